import pathlib

root = pathlib.Path("/app/archive")
contents = {"a/x.bin": "x" * 5000, "b/x copy.bin": "x" * 5000, "b/y.bin": "x" * 4999 + "y", "c/deep/er/x.bin": "x" * 5000,
            "c/note.txt": "note\n", "a/note.txt": "note\n", "a/other.txt": "eton\n", "d/empty1": "", "d/empty2": ""}
for name, text in contents.items():
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)
