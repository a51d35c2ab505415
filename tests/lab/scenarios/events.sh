# The kubelet gets changes at once: cable out, NIC unplugged and plugged in, kubelet restarted
# lab: memory=1536 timeout=300 images=pods binaries=rdma-device-plugin standins=kubelet-standin
# shellcheck shell=bash disable=SC2016

resource=rdma/hca_shared_devices_a
offered() { kubelet-standin node --json | jq -r ".[\"$resource\"].allocatable"; }

ip link set eth0 name ens2f0
make_hca ens2f0 mlx5_0
start_containerd
start_kubelet
# Our own format: in that of the RDMA shared device plugin a port's state makes no unit unhealthy.
cat >/tmp/config.yaml <<-'CONFIG'
	version: 1
	pools:
	- resource: rdma/hca_shared_devices_a
	  mode: shared
	  shares: 1000
	  select:
	    ifNames: [ens2f0]
CONFIG
start_daemon /tmp/config.yaml
kubelet-standin node --wait $resource=1000
pass "the HCA is offered"

ip -tshort -oneline monitor link >"$LAB_OUT/links" &
wait_for 20 grep -q . "/proc/$!/net/netlink"
lists() { grep 'device list' "$LAB_OUT/kubelet.log"; }
milliseconds() { date --date "$1" +%s%3N; }
had=$(lists | wc -l)
check "cable out: nothing is allocatable" eval 'machine set_link nic0 off && kubelet-standin node --wait $resource=0'
wait_for 20 grep -q NO-CARRIER "$LAB_OUT/links"
event=$(sed -n '/NO-CARRIER/{s/^\[\([^]]*\)\].*/\1/p;q}' "$LAB_OUT/links")
listed=$(lists | sed -n "$((had + 1))s/ .*//p")
late=$(($(milliseconds "$listed") - $(milliseconds "$event")))
echo "the kubelet had the list $late ms after the kernel's event"
# Far from what a poll could do, and as much as an emulated, busy processor may take.
check "the event triggers the list, not a poll" test $late -lt 2000
check "cable in: all of it is" eval 'machine set_link nic0 on && kubelet-standin node --wait $resource=1000'

for round in $(seq 5); do
	kubelet-standin restart-kubelet
	kubelet-standin node --wait $resource=1000
done
pass "registered again after each of $round restarts of the kubelet"

machine device_del nic0
check "NIC unplugged: nothing is allocatable" kubelet-standin node --wait $resource=0
wait_for 30 eval '[ ! -e /sys/class/net/ens2f0 ]'
check "another is plugged in" machine device_add virtio-net-pci,id=nic9,netdev=net0,bus=port0,mac=52:54:00:00:01:09
wait_for 30 test -e /sys/class/net/eth0
ip link set eth0 name ens2f0
make_hca ens2f0 mlx5_0
check "it is offered in the other's place" kubelet-standin node --wait $resource=1000
