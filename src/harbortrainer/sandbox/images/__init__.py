"""The images that tasks ask for: built or pulled by a program that knows how, and mounted layer by layer."""
