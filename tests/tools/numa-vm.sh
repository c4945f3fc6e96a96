#!/bin/bash
# numa-vm.sh SCRIPT [qemu -smp/-m/-numa args...]   run SCRIPT (bash) as root in a throw-away VM with several NUMA nodes.
# Host root is visible read-only (9p), the directory of SCRIPT is /tmp/share (rw). Software emulation (TCG): boots in ~10-15 s; ended after T seconds (300).
# Needs: qemu-system-x86, linux-image-amd64 (kernel + modules), busybox-static, cpio.  APPEND="numa=fake=12" adds kernel arguments.
set -e
S=$(realpath "$1"); shift; W=$(mktemp -d); trap 'rm -rf "$W"' EXIT
V=$(ls /lib/modules | tail -1); mkdir -p "$W"/ir/{bin,proc,sys,dev,host,mod}; cp "$(command -v busybox)" "$W/ir/bin/busybox"
MODS=$(for m in virtio_pci 9pnet_virtio 9p; do /sbin/modprobe -S "$V" --show-depends $m; done | awk '$1=="insmod"{print $2}' | awk '!s[$0]++')
L=""; for f in $MODS; do cp "$f" "$W/ir/mod/"; L="$L $(basename "$f")"; done
cat >"$W/ir/init" <<I
#!/bin/busybox sh
B=/bin/busybox; \$B mount -t proc proc /proc; \$B mount -t sysfs sys /sys; \$B mount -t devtmpfs dev /dev
for m in $L; do \$B insmod /mod/\$m; done
\$B mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144,cache=loose,ro host /host
for d in proc sys dev; do \$B mount -o move /\$d /host/\$d; done
\$B mount -t tmpfs -o mode=1777 tmp /host/tmp; \$B mkdir -p /host/dev/shm /host/tmp/share; \$B mount -t tmpfs shm /host/dev/shm
\$B mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144 share /host/tmp/share
\$B echo "VM-START"; PATH=/usr/bin:/bin:/usr/sbin:/sbin \$B chroot /host /bin/bash /tmp/share/$(basename "$S"); \$B echo "VM-END rc=\$?"
\$B sync; echo o > /host/proc/sysrq-trigger; \$B sleep 9
I
chmod +x "$W/ir/init"; (cd "$W/ir" && find . | cpio -o -H newc --quiet | gzip -1 >"$W/ir.gz")
[ $# -gt 0 ] || set -- -smp 4 -m 2048M -object memory-backend-ram,id=m0,size=1G -object memory-backend-ram,id=m1,size=1G -numa node,nodeid=0,cpus=0-1,memdev=m0 -numa node,nodeid=1,cpus=2-3,memdev=m1
timeout "${T:-300}" qemu-system-x86_64 -accel tcg,thread=multi -cpu max -kernel "/boot/vmlinuz-$V" -initrd "$W/ir.gz" -append "console=ttyS0 quiet panic=-1 $APPEND" \
 -nographic -no-reboot -nodefaults -serial stdio -virtfs local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap \
 -virtfs "local,path=$(dirname "$S"),mount_tag=share,security_model=none" "$@" 2>&1 | stdbuf -o0 tr -d '\r' | sed -un '/VM-START/,/VM-END/p'
