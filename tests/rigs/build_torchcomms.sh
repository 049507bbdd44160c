#!/usr/bin/env bash
# torchcomms for tests, as Python package `torchcomms` in the folder that is named, built of its source for CPUs (its gloo
# and its Python back ends). PYTHON is an interpreter with torch; Debian's libgoogle-glog-dev
# libgflags-dev libfmt-dev nlohmann-json3-dev cmake ninja-build g++ come first. SOURCES, a folder with `torchcomms` and
# `gloo`, spares fetching them.
set -euo pipefail
COMMIT=59426ba4bfee75800b2909274d200401c4d5d2df GLOO=70dc360272dfc57e3617184c78ff9b06f8cd4757
mkdir -p "$1"
to=$(cd "$1" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
fetch() { # of a repository, at a commit, the folders that are named
  git clone -q --no-checkout --filter=blob:none "${SOURCES:-https://github.com/$1}/$2" "$2"
  git -C "$2" sparse-checkout set "${@:4}"
  git -C "$2" checkout -q "$3"
}
fetch meta-pytorch torchcomms "$COMMIT" comms/torchcomms
fetch pytorch gloo "$GLOO" gloo
# Debian's gflags is static first, which no shared object can have; its JSON is a little older than what is asked for
mkdir -p prefix/include prefix/lib json
ln -s /usr/include/gflags prefix/include/gflags
ln -s "$(dpkg -L libgflags-dev | grep '/libgflags.so$')" prefix/lib/libgflags.so
ln -s /usr/include/glog prefix/include/glog
ln -s "$(dpkg -L libgoogle-glog-dev | grep '/libglog.so$')" prefix/lib/libglog.so
printf 'add_library(nlohmann_json INTERFACE)\nadd_library(nlohmann_json::nlohmann_json ALIAS nlohmann_json)\n' > json/CMakeLists.txt
CONDA_PREFIX=$work/prefix cmake -G Ninja -S torchcomms -B build -DCMAKE_BUILD_TYPE=Release '-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG' \
  -DCMAKE_PREFIX_PATH="$("$PYTHON" -c 'import torch; print(torch.utils.cmake_prefix_path)')" -DPython3_EXECUTABLE="$PYTHON" \
  -DUSE_NCCL=OFF -DUSE_NCCLX=OFF -DUSE_TRANSPORT=OFF -DUSE_TRANSPORT_CCA_HOOK=OFF -DLIB_SUFFIX=lib \
  -DFETCHCONTENT_SOURCE_DIR_NLOHMANN_JSON="$work/json" -DCMAKE_INSTALL_PREFIX="$work/made" > configured.log ||
  { cat configured.log; exit 1; }
ninja -C build install > built.log || { tail -50 built.log; exit 1; }
rm -rf "$to/torchcomms" "$to"/torchcomms-*.dist-info
cp -r torchcomms/comms/torchcomms "$to/torchcomms"
cp made/*.so "$to/torchcomms/"
find "$to/torchcomms" -name '*.[ch]pp' -delete -o -name '*.cu*' -delete
# how it finds its own back ends
mkdir "$to/torchcomms-0.3.0.dist-info"
cd "$to/torchcomms-0.3.0.dist-info"
printf 'Metadata-Version: 2.1\nName: torchcomms\nVersion: 0.3.0\n' > METADATA
printf '[torchcomms.backends]\nfake = torchcomms._comms\ngloo = torchcomms._comms_gloo\n' > entry_points.txt
