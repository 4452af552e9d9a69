#!/bin/sh
# Write the exact versions of the packages in each image, and of those that `make` installs (dev.txt).
# Needs uv, and the CPU build of torch from UV_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
# or a folder of wheels in UV_FIND_LINKS.
set -eu
cd "$(dirname "$0")"
export UV_CUSTOM_COMPILE_COMMAND=deploy/requirements/lock.sh
torch=$(mktemp)
trap 'rm "$torch"' EXIT

compile() { # NAME [ARGUMENT...]
  name=$1
  shift
  uv pip compile --quiet --no-annotate --python-version 3.11 --output-file "$name.txt" "$@"
}

lock() { # FLAVOR [ARGUMENT...]
  compile "$@" --python-platform x86_64-manylinux_2_28
}

echo "torch==2.13.0+cpu" > "$torch"
lock cpu ../../pyproject.toml --extra tracing --override "$torch"
# Without the additional source, since 2.13.0+cpu would match as well.
echo "torch==2.13.0" > "$torch"
UV_FIND_LINKS='' UV_EXTRA_INDEX_URL='' lock cuda ../../pyproject.toml --extra tracing \
  --override "$torch"
UV_FIND_LINKS='' UV_EXTRA_INDEX_URL='' compile dev ../../pyproject.toml --extra dev --universal \
  --override "$torch"
lock control control.in --constraints cpu.txt
