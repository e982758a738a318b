"""Every module imports with the installed releases, and each private API in use is there."""

import importlib
import pkgutil

import pytest

import harbortrainer

MODULES = [module.name for module in pkgutil.walk_packages(harbortrainer.__path__, "harbortrainer.")]


@pytest.mark.torch
@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith("__main__")])
def test_module_imports(name):
    pytest.importorskip("torch", reason="the extra `local` is not installed")
    importlib.import_module(name)
