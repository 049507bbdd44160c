#!/bin/bash
# Builds what the two virtual machines of the Soft-RoCE rig boot from: build_image.sh FOLDER SITE_PACKAGES...
#
# FOLDER gets vmlinuz, initrd.gz, disk.img (Debian 12, its stock kernel, rdma-core, sshd), and throw-away SSH keys. The
# packages in the SITE_PACKAGES folders (Python 3.11: torch, numpy, what `het` needs, the direct engines where they are
# installed) are copied into the image. Needs root, a Debian mirror, ~4 GB, and: qemu-system-x86 debootstrap
# busybox-static cpio e2fsprogs openssh-client. Takes about five minutes; what is there already is kept.
set -euo pipefail
guest=$(dirname "$(readlink -f "$0")")/guest
mkdir -p "$1" && cd "$1" && shift

[ -e root/etc/hetctl-rig ] || {
  rm -rf root
  debootstrap --variant=minbase --include=iproute2,rdma-core,ibverbs-utils,ibverbs-providers,librdmacm1,rdmacm-utils,\
python3,libpython3.11,kmod,iputils-ping,procps,libnuma1,libgomp1,libcurl4,openssh-server,perftest bookworm root >debootstrap.log
  touch root/etc/hetctl-rig
}
[ -d kernel ] || {
  package=$(apt-cache depends linux-image-amd64 | awk '/Depends/{print $2}')
  apt-get download "$package" && dpkg -x "$package"_*.deb kernel.new && rm "$package"_*.deb && mv kernel.new kernel
}
release=$(ls kernel/lib/modules)
cp kernel/boot/vmlinuz-"$release" vmlinuz
mkdir -p root/lib/modules && cp -a "kernel/lib/modules/$release" root/lib/modules/
cp kernel/boot/config-"$release" root/boot/  # the probe reads it
chroot root depmod "$release"

[ -e user ] || ssh-keygen -q -t ed25519 -N '' -C hetctl-rig -f user
[ -e host ] || ssh-keygen -q -t ed25519 -N '' -C hetctl-rig-host -f host
install -D -m 600 user.pub root/root/.ssh/authorized_keys
install -m 600 host root/etc/ssh/ssh_host_ed25519_key
install -m 755 "$guest/start" root/sbin/rig-start
install -m 755 "$guest/serve" root/sbin/rig-serve
install -m 755 "$(command -v busybox)" root/bin/busybox
install -m 644 "$guest/inittab" root/etc/inittab

site=root/usr/lib/python3/dist-packages
for folder in "$@"; do
  (cd "$folder" && for name in torch torch-*.dist-info torchgen functorch numpy numpy.libs numpy-*.dist-info \
    typing_extensions.py sympy mpmath networkx jinja2 markupsafe filelock fsspec yaml _yaml safetensors psutil \
    nixl nixl-*.dist-info nixl_meta_utils.py nixl_cu1* .nixl_cu1*.mesonpy.libs mooncake mooncake_transfer_engine*; do
    [ -e "$name" ] && cp -a --no-clobber "$name" "$OLDPWD/$site/"
  done; true)
done
rm -rf "$site"/torch/{include,test,share} "$site"/torch/bin/*test*

# an initramfs that only finds the disk: the modules for it, in the order in which they need each other
rm -rf initramfs && mkdir -p initramfs/{bin,proc,sys,dev,mnt,modules}
install -m 755 "$(command -v busybox)" initramfs/bin/busybox
install -m 755 "$guest/init" initramfs/init
for module in virtio_pci virtio_blk ext4 crc32c_generic; do
  chroot root modprobe -S "$release" --show-depends $module
done | awk '/^insmod/ && !seen[$2]++ {print $2}' | while read -r path; do
  cp "root$path" initramfs/modules/ && basename "$path" >> initramfs/modules/order
done
(cd initramfs && find . | cpio --quiet -o -H newc | gzip -1 > ../initrd.gz)

size=$(( $(du -sm root | cut -f1) + 700 ))
rm -f disk.img && truncate -s ${size}M disk.new
mke2fs -q -F -t ext4 -O ^has_journal,^metadata_csum -d root disk.new && mv disk.new disk.img
echo "built $(du -sh disk.img | cut -f1) in $PWD"
