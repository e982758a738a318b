#!/bin/sh
for f in $(find $1); do
  d=$2/$(dirname $f)
  mkdir -p $d
  cp $f $d
  sha256sum $f >> $2/MANIFEST
done
echo done
