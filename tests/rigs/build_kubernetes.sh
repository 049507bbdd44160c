#!/usr/bin/env bash
# Kubernetes' control plane for tests, in the folder that is named: etcd, kubectl and Go as Debian 12 packages them
# (unpacked there, not installed), and the API server, scheduler and controllers built from Debian's source package,
# which makes no packages of them. About five minutes of CPU, a gigabyte while it builds.
set -euo pipefail
mkdir -p "$1"
to=$(cd "$1" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
mkdir -p lists/partial parts root go/src/k8s.io
for list in /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list; do
  [ -f "$list" ] && sed -e 's/^Types: deb$/Types: deb-src/' -e 's/^deb /deb-src /' "$list" > "parts/$(basename "$list")"
done
sources=(-o Dir::Etc::SourceList=/dev/null -o "Dir::Etc::SourceParts=$work/parts" -o "Dir::State::Lists=$work/lists")
sources+=(-o APT::Sandbox::User=root -qq)
apt-get "${sources[@]}" update
apt-get "${sources[@]}" source --download-only kubernetes
apt-get -qq -o APT::Sandbox::User=root download etcd-server kubernetes-client golang-1.19-go golang-1.19-src
for package in *.deb; do dpkg-deb -x "$package" root; done
dpkg-source --no-check -x kubernetes_*.dsc go/src/k8s.io/kubernetes > /dev/null

export GOROOT=$work/root/usr/lib/go-1.19 GOPATH=$work/go GOCACHE=$work/cache GO111MODULE=off GOPROXY=off CGO_ENABLED=0
export PATH=$GOROOT/bin:$PATH
cd go/src/k8s.io/kubernetes
go build -o "$work/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
describe() { # the API's description, which the source package leaves to be generated: of which parts, for which package
  local from=() package=$1
  shift
  for part in "$@"; do from+=("staging/src/k8s.io/$part"); done
  local tagged
  tagged=$(grep -rl --include=*.go '+k8s:openapi-gen=' "${from[@]}" | xargs -n1 dirname | sort -u |
    sed 's#^staging/src/#k8s.io/kubernetes/vendor/#' | paste -sd,)
  "$work/openapi-gen" --go-header-file hack/boilerplate/boilerplate.generatego.txt -O zz_generated.openapi \
    -p "k8s.io/kubernetes/$package" -i "$tagged" -r "$work/violations" --output-base "$GOPATH/src"
}
describe pkg/generated/openapi api apimachinery apiserver client-go kube-aggregator apiextensions-apiserver metrics \
  component-base kube-controller-manager kube-proxy kube-scheduler kubelet cloud-provider
describe vendor/k8s.io/kube-aggregator/pkg/generated/openapi api apimachinery kube-aggregator
describe vendor/k8s.io/apiextensions-apiserver/pkg/generated/openapi api apimachinery apiextensions-apiserver
version=$(sed -n 's/^Version: .*really\([0-9.]*\)-.*/v\1/p' "$work"/kubernetes_*.dsc)
about=k8s.io/kubernetes/vendor/k8s.io/component-base/version
nice go build -ldflags "-s -w -X $about.gitVersion=$version -X $about.gitMajor=1 -X $about.gitMinor=$(cut -d. -f2 <<< "$version")" \
  -o "$to/" ./cmd/kube-apiserver ./cmd/kube-controller-manager ./cmd/kube-scheduler
install "$work/root/usr/bin/etcd" "$work/root/usr/bin/kubectl" "$to/"
