"""Same content, same inode; different content, different inode; nothing lost; the saving is right."""

import pathlib

root = pathlib.Path("/app/archive")
files = {str(p.relative_to(root)): p for p in root.rglob("*") if p.is_file() and not p.is_symlink()}
big, note = "x" * 5000, "note\n"
expected = {"a/x.bin": big, "b/x copy.bin": big, "b/y.bin": "x" * 4999 + "y", "c/deep/er/x.bin": big,
            "c/note.txt": note, "a/note.txt": note, "a/other.txt": "eton\n", "d/empty1": "", "d/empty2": ""}
assert {name: path.read_text() for name, path in files.items()} == expected
inodes = {name: path.stat().st_ino for name, path in files.items()}
groups = {inodes[n] for n in ("a/x.bin", "b/x copy.bin", "c/deep/er/x.bin")}, {inodes[n] for n in ("c/note.txt", "a/note.txt")}
assert all(len(group) == 1 for group in groups)
assert len(set(inodes.values())) == 6
assert pathlib.Path("/app/saved.txt").read_text().strip() == "10005"
