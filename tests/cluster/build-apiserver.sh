#!/usr/bin/env bash
# Build a kube-apiserver that can keep custom resources, from Debian's source package; optional, some 10 minutes.
#
#     tests/cluster/build-apiserver.sh FOLDER
#     export KUBELAB_BIN=FOLDER        # then start the lab: it takes its binaries from there
#
# Why: Kubernetes 1.20 vendors a modern-go/reflect2 that reads Go's maps by their inner layout. Built with Go 1.19, the
# server dies of it (SIGSEGV in sortKeysMapEncoder) as soon as an object of a custom resource is stored. Debian packages
# a reflect2 that is new enough; with that one in its place the same source works.
#
# Needs root, Debian bookworm and its mirror as apt has it; downloads sources and Go through apt alone. Leaves apt's own
# lists and sources as they are.
set -euo pipefail

out=$(realpath -m "${1:?usage: $0 FOLDER}")
version=1.20.5+really1.20.2-1.1+deb12u1
mkdir -p "$out"
if [ -x "$out/kube-apiserver" ]; then
    echo "$out/kube-apiserver is there already" >&2
    exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

say() { echo "[$(date +%T)] $*"; }

say "installing Go and what else is needed"
apt-get -o DPkg::Lock::Timeout=600 update -q
DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600 install -y -q --no-install-recommends \
    golang-1.19-go golang-github-modern-go-reflect2-dev patch xz-utils

# Debian's images list binary packages only: the same places, as sources, for this one call.
mkdir -p "$work/apt/lists/partial" "$work/apt/parts"
chmod 755 "$work" # apt fetches as a user of its own
for list in /etc/apt/sources.list /etc/apt/sources.list.d/*.list; do
    [ ! -f "$list" ] || sed -n 's/^deb /deb-src /p' "$list"
done >"$work/apt/sources.list"
for list in /etc/apt/sources.list.d/*.sources; do
    [ ! -f "$list" ] || sed 's/^Types:.*/Types: deb-src/' "$list" >"$work/apt/parts/$(basename "$list")"
done
apt=(apt-get -o "Dir::Etc::sourcelist=$work/apt/sources.list" -o "Dir::Etc::sourceparts=$work/apt/parts"
    -o "Dir::State::lists=$work/apt/lists")
say "fetching the sources of Kubernetes $version"
"${apt[@]}" update -q
cd "$work"
"${apt[@]}" source --download-only "kubernetes=$version"

export PATH=/usr/lib/go-1.19/bin:$PATH GOPATH=$work/go GO111MODULE=off CGO_ENABLED=0
export GOCACHE=${GOCACHE:-$work/cache}
source=$GOPATH/src/k8s.io/kubernetes
mkdir -p "$source"
tar -xf kubernetes_*.orig.tar.* --strip-components=1 -C "$source"
tar -xf kubernetes_*.debian.tar.* -C "$source"
cd "$source"
while read -r patch; do
    case $patch in '' | '#'*) ;; *) patch -p1 --quiet <"debian/patches/${patch%% *}" ;; esac
done <debian/patches/series

rm -r vendor/github.com/modern-go/reflect2
cp -r /usr/share/gocode/src/github.com/modern-go/reflect2 vendor/github.com/modern-go/reflect2
rm -f vendor/github.com/modern-go/reflect2/unsafe_link_gccgo.go # for another compiler

# The API's description is generated code, which the source package does not hold.
say "generating the API's description"
go build -o "$work/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
packages=$(grep -rl --include='*.go' '+k8s:openapi-gen=' pkg staging/src/k8s.io vendor/k8s.io | grep -v generated/openapi \
    | xargs -n1 dirname | grep -v /testdata/ | sort -u \
    | sed -e 's|^staging/src/|k8s.io/kubernetes/vendor/|' -e 's|^vendor/|k8s.io/kubernetes/vendor/|' \
        -e 's|^pkg/|k8s.io/kubernetes/pkg/|' | sort -u | paste -sd,)
"$work/openapi-gen" --logtostderr -i "$packages" -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi \
    -h hack/boilerplate/boilerplate.generatego.txt -r "$work/violations"

say "building the API server, some 1,500 packages"
go build -v -p 2 -trimpath -ldflags '-s -w' -o "$work/kube-apiserver" ./cmd/kube-apiserver 2>&1 \
    | awk '/^[[:alnum:]._\/-]+$/ { if (++built % 100 == 0) { print built " packages"; fflush() } next } { print; fflush() }'
mv "$work/kube-apiserver" "$out/kube-apiserver"
say "$out/kube-apiserver"
