"""Images of tasks: built or pulled by buildah, Docker or podman, and mounted layer by layer."""
