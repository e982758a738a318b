#!/bin/bash
# Same content, same inode; different content, different inode; nothing lost; the saving is right.
# The shell compares by itself: an agent can replace python3, find and cmp.
shopt -s globstar dotglob nullglob
cd /app/archive || exit
printf -v big '%5000s' ''
big=${big// /x}
declare -A expected=(
  ["a/x.bin"]=$big ["b/x copy.bin"]=$big ["c/deep/er/x.bin"]=$big ["b/y.bin"]=${big%x}y
  ["c/note.txt"]=$'note\n' ["a/note.txt"]=$'note\n' ["a/other.txt"]=$'eton\n' ["d/empty1"]= ["d/empty2"]=
)
reward=1
fail() { echo "$1"; reward=0; }
for path in **; do
  [[ -d $path && ! -L $path || -v expected[$path] ]] || fail "unexpected: $path"
done
for path in "${!expected[@]}"; do
  content= && [[ -f $path && ! -L $path ]] && IFS= read -rd '' content < "$path"
  [[ -f $path && ! -L $path && $content == "${expected[$path]}" ]] || fail "lost or changed: $path"
  for other in "${!expected[@]}"; do
    [[ -n ${expected[$path]} && ${expected[$path]} == "${expected[$other]}" || $path == "$other" ]] && same=yes || same=no
    [[ $path -ef $other ]] && linked=yes || linked=no
    [[ $linked == "$same" ]] || fail "$path and $other: same content $same, same inode $linked"
  done
done
[[ $(< /app/saved.txt) == 10005 ]] || fail "wrong number in saved.txt"
echo "$reward" > /logs/verifier/reward.txt
