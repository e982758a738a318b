"""What tests of images need, and why it is not there: a builder, and a base image that cannot be pulled."""

import shutil
import subprocess

import pytest

from harbortrainer.sandbox.images.image_choice import missing_for_a_builder

BASE = "debian:12-slim"


def missing() -> str:
    """Why there can be no images here; "" when there can."""
    if why := missing_for_a_builder():
        return why
    known = subprocess.run(["buildah", "inspect", "--type", "image", BASE], capture_output=True, check=False)
    return "" if known.returncode == 0 else f"the base image {BASE} is not here (.ci/run makes it)"


WHY = missing() if shutil.which("buildah") else "buildah is not here (.ci/run installs it)"
needs_images = pytest.mark.skipif(bool(WHY), reason=WHY or "-")
