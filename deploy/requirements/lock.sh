#!/bin/sh
# Write the exact versions and the hashes of the packages in each image (control.txt, cpu.txt, cuda.txt), of
# those that build Headrace (build.txt), and of those that `make` installs (run.txt, dev.txt).
# Needs uv, and the CPU build of torch from UV_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
# or a folder of wheels in UV_FIND_LINKS. `./lock.sh --upgrade` takes the newest versions.
set -eu
cd "$(dirname "$0")"
export UV_CUSTOM_COMPILE_COMMAND=deploy/requirements/lock.sh
upgrade=${1:-}
torch=$(mktemp)
trap 'rm "$torch"' EXIT

compile() { # NAME [ARGUMENT...]
  name=$1
  shift
  uv pip compile --quiet ${upgrade} --no-annotate --generate-hashes --python-version 3.11 \
    --output-file "$name.txt" "$@"
}

lock() { # FLAVOR [ARGUMENT...]
  compile "$@" --python-platform x86_64-manylinux_2_31
}

echo "torch==2.13.0+cpu" > "$torch"
lock cpu ../../pyproject.toml --extra tracing --override "$torch"
# `make` installs torch before, since its builds differ by device, system and Python. The CPU build has
# no CUDA packages, which would otherwise be in these files as well.
compile dev ../../pyproject.toml --extra dev --universal --override "$torch" --no-emit-package torch
compile run ../../pyproject.toml --universal --override "$torch" --no-emit-package torch \
  --constraints dev.txt
python3 -c 'import tomllib
print(*tomllib.load(open("../../pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")' \
  | compile build - --universal --constraints dev.txt
lock control control.in --constraints cpu.txt
# Without the additional source, since 2.13.0+cpu would match as well.
echo "torch==2.13.0" > "$torch"
UV_FIND_LINKS='' UV_EXTRA_INDEX_URL='' lock cuda ../../pyproject.toml --extra tracing \
  --override "$torch"
