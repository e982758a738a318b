#!/bin/bash
set -euo pipefail
cat > /app/handbook/Makefile <<'MAKE'
CHAPTERS = $(sort $(wildcard chapters/*.txt))
NUMBERED = $(CHAPTERS:chapters/%.txt=build/%.num)

handbook.txt: title.txt $(NUMBERED)
	cat title.txt $(NUMBERED) > $@

build/%.num: chapters/%.txt number.sh | build
	./number.sh $< > $@

build:
	mkdir -p $@

.PHONY: clean
clean:
	rm -rf build handbook.txt
MAKE
