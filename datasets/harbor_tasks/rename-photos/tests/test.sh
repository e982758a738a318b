#!/bin/sh
# Every photo must carry the pixels that belong to its new name, and nothing may be left over.
reward=1
check() { [ "$(cat "/app/photos/$1.jpg" 2>/dev/null)" = "pixels of $2" ] && grep -q "^taken: ${1%_*}\$" "/app/photos/$1.txt" 2>/dev/null || reward=0; }
check 2023-12-31_01 "IMG_0007"
check 2023-12-31_02 "new year's eve"
check 2024-05-01_01 "IMG_0412"
check 2024-05-01_02 "beach walk"
check 2024-05-01_03 "dinner"
check 2024-05-02_01 "sunset (final)"
[ "$(ls -A /app/photos | wc -l)" -eq 12 ] || reward=0
echo "$reward" > /logs/verifier/reward.txt
