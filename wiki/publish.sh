#!/usr/bin/env bash
# Copies wiki/ into a clone of the Git host's wiki repository, with links as a wiki wants them:
#
#     git clone https://HOST/OWNER/NAME.wiki.git ../wiki-clone && wiki/publish.sh ../wiki-clone
#
# In this repository a page links to `Page.md` and to files by `../`; in a wiki, to `Page` and to
# `../blob/main/`, or for a picture to `../raw/main/`.
set -euo pipefail
to=$(cd "$1" && pwd)
cd "$(dirname "$0")"
for page in *.md; do
    sed -E -e 's|\]\(\.\./|](../blob/main/|g' -e 's|(!\[[^]]*\])\(\.\./blob/|\1(../raw/|g' \
        -e 's|\]\(([A-Za-z-]+)\.md|](\1|g' "$page" >"$to/$page"
done
if [ -d images ]; then
    mkdir -p "$to/images"
    cp images/* "$to/images/"
fi
