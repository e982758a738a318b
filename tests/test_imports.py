"""Every module imports with the installed releases, and each private API in use is there."""

import importlib
import pkgutil
import subprocess
import sys

import pytest

import harbortrainer

MODULES = [module.name for module in pkgutil.walk_packages(harbortrainer.__path__, "harbortrainer.")]


@pytest.mark.torch
@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith("__main__")])
def test_module_imports(name):
    pytest.importorskip("torch", reason="the extra `local` is not installed")
    importlib.import_module(name)


@pytest.mark.process
def test_listing_tasks_imports_no_trial_and_no_rich():
    code = "import sys, harbortrainer.commands.tasks; print(*sys.modules)"
    listed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    slow = ("harbortrainer.trials", "harbortrainer.tasks.task_check", "rich.console", "harbor")
    assert "harbortrainer.tasks.task_listing" in listed
    assert [name for name in slow if name in listed] == []
