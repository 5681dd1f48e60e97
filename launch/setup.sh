#!/usr/bin/env bash
# Installs the Debian packages that Shoal needs and that are missing, with one call of apt-get. Called by
# launch/quickstart.sh and tests/run.sh; does nothing, and needs no root, when everything is there.
#   launch/setup.sh          install what is missing
#   launch/setup.sh --list   print the packages, one a line
set -euo pipefail

packages=(
  g++ cmake ninja-build pkg-config git # build
  libopenmpi-dev openmpi-bin           # ranks
  libyaml-cpp-dev libcli11-dev         # configuration, commands
  nlohmann-json3-dev                   # tokenizer files, metrics
  libfmt-dev                           # reports
  libhdf5-dev libxxhash-dev            # checkpoints, token files
  libopenblas-openmp-dev               # matrix products
  libonig-dev                          # pre-tokenizer regexes
  libgtest-dev hdf5-tools iproute2     # tests
  libbenchmark-dev                     # benchmarks, which the tests only compile
  valgrind                             # tests that count instructions
  python3.11-doc                       # text of the quickstart
)
corpus=/usr/share/doc/python3.11/html/_sources

case "${1-}" in
  "") ;;
  --list)
    printf '%s\n' "${packages[@]}"
    exit 0
    ;;
  *)
    echo "usage: launch/setup.sh [--list]" >&2
    exit 2
    ;;
esac

if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
  echo "setup: no apt here, so nothing is installed. Needed are the equivalents of these Debian packages:" >&2
  echo "  ${packages[*]}" >&2
  exit 0
fi

# Package names of all architectures in the state "installed", one a line.
installed=$(dpkg-query -W -f='${db:Status-Status} ${Package}\n' "${packages[@]}" 2>/dev/null |
  sed -n 's/^installed //p' || true)
missing=()
for package in "${packages[@]}"; do
  grep -qxF -- "$package" <<<"$installed" || missing+=("$package")
done
# Container images often leave out /usr/share/doc: the package is there, its files are not.
[[ -d $corpus || " ${missing[*]-} " == *" python3.11-doc "* ]] || missing+=(python3.11-doc)
[[ ${#missing[@]} -gt 0 ]] || exit 0

install=(apt-get install -y -q --no-install-recommends -o "Dpkg::Options::=--path-include=$corpus/*"
  -o Dpkg::Use-Pty=0 --reinstall)
if [[ $(id -u) -ne 0 ]]; then
  {
    echo "setup: these Debian packages are missing, and installing them needs root:"
    echo "  ${missing[*]}"
    echo "run this once, then start again:"
    echo "  sudo launch/setup.sh"
  } >&2
  exit 1
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
echo "setup: installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update -q && "${install[@]}" "${missing[@]}"; } >"$log" 2>&1 </dev/null; then
  {
    echo "setup: apt-get failed; its last lines:"
    tail -n 15 "$log" | sed 's/^/  /'
    echo "still needed: ${missing[*]}"
  } >&2
  exit 1
fi
if [[ ! -d $corpus ]]; then
  echo "setup: python3.11-doc is installed but $corpus is missing; set TEXT=FILE for the quickstart" >&2
fi
