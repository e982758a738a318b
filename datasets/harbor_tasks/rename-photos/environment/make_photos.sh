#!/bin/sh
set -eu
mkdir -p /app/photos && cd /app/photos
add() { printf 'pixels of %s\n' "$1" > "$1.jpg"; printf 'camera: X100\ntaken: %s\n' "$2" > "$1.txt"; }
add "IMG_0412" 2024-05-01
add "beach walk" 2024-05-01
add "IMG_0007" 2023-12-31
add "sunset (final)" 2024-05-02
add "dinner" 2024-05-01
add "new year's eve" 2023-12-31
