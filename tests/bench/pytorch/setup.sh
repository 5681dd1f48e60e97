#!/usr/bin/env bash
# Makes the scratch environments of the comparison with PyTorch, outside the repository and without root:
#   tests/bench/pytorch/setup.sh FOLDER
# FOLDER/newest/python is the newest PyTorch that pip finds, FOLDER/debian/python Debian's python3-torch, unpacked and
# not installed, on OpenBLAS with OpenMP. FOLDER/versions says what both are. What is there already is kept. About 7 GB:
# the packages that pip finds are built for CUDA too and do not load without its libraries; the CPU part is the same.
set -euo pipefail

[[ $# -eq 1 && $1 != -* ]] || {
  echo "usage: tests/bench/pytorch/setup.sh FOLDER" >&2
  exit 2
}
mkdir -p "$1"
folder=$(cd "$1" && pwd)

make_newest() {
  local python
  python=$(command -v python3)
  "$python" -m venv "$folder/newest.part"
  "$folder/newest.part/bin/python" -m pip install -q --no-cache-dir torch numpy h5py
  # A virtual environment may be moved as long as it is started through its python.
  printf '#!/bin/sh\nexec "${0%%/*}/bin/python" "$@"\n' >"$folder/newest.part/python"
  chmod +x "$folder/newest.part/python"
  mv "$folder/newest.part" "$folder/newest"
}

# The packages that apt would install for python3-torch, unpacked.
make_debian() {
  local part=$folder/debian.part packages
  rm -rf "$part"
  mkdir -p "$part/packages"
  mapfile -t packages < <(apt-get install -s --no-install-recommends python3-torch python3-h5py |
    awk '/^Inst/ { print $2 }')
  (cd "$part/packages" && apt-get download -q "${packages[@]}" >download.log 2>&1) || {
    tail -n 5 "$part/packages/download.log" >&2
    exit 1
  }
  for package in "$part"/packages/*.deb; do dpkg -x "$package" "$part"; done
  rm -rf "$part/packages"
  cat >"$part/python" <<'WRAPPER'
#!/usr/bin/env bash
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
lib=usr/lib/x86_64-linux-gnu
export PYTHONPATH=$here/usr/lib/python3/dist-packages
export LD_LIBRARY_PATH=/$lib/openblas-openmp:$here/$lib:$here/usr/lib:$here/lib/x86_64-linux-gnu
exec /usr/bin/python3 "$@"
WRAPPER
  chmod +x "$part/python"
  mv "$part" "$folder/debian"
}

[[ -x $folder/newest/python ]] || make_newest
[[ -x $folder/debian/python ]] || make_debian
for name in newest debian; do
  "$folder/$name/python" - "$name" <<'VERSIONS'
import platform, sys, torch
config = [line.strip(" -") for line in torch.__config__.show().splitlines()]
libraries = [line for line in config if line.startswith("Intel(R)")]
print("; ".join([f"{sys.argv[1]}: Python {platform.python_version()}, PyTorch {torch.__version__}", *libraries]))
VERSIONS
done | tee "$folder/versions"
