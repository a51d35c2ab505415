# A runtime of its own: containerd's client runs containers on our plugin, alone and in a chain
# lab: memory=1536 nics=2 timeout=300 images=pods binaries=rdma-netdev,rdma-ipam,rdmactl
# shellcheck shell=bash disable=SC2016,SC2154

make_hca eth1 mlx5_1
ip addr add 10.61.0.1/24 dev eth1
start_containerd
cp /lab/bin/rdma-netdev /lab/bin/rdma-ipam /usr/lib/cni/{macvlan,host-local,loopback} /opt/cni/bin/
image=localhost/rdma-tools:1
network() {
	rm -f /etc/cni/net.d/*
	echo "$1" >/etc/cni/net.d/10-rails.conflist
}
run() { timeout 120 ctr --namespace k8s.io run --rm --cni "$image" "$1" "${@:2}"; }

before=$(host_state)
network '{"cniVersion": "1.0.0", "name": "rails", "plugins": [
	{"type": "rdma-netdev", "attach": "macvlan", "master": "eth1",
	 "ipam": {"type": "rdma-ipam", "range": "10.61.0.0/24", "range_start": "10.61.0.10"}}]}'
check "ctr run --cni: the plugin alone" run alone ip -o addr show dev eth0
contains "the container has its address" 'inet 10.61.0.1[0-9]/24' "$checked"
equal "nothing is left of it: leases" "[]" "$(rdmactl addresses --json | jq -c .leases)"
equal "nothing is left of it: attachments" "" "$(find /var/lib/rdma-netdev/attachments -type f)"

network '{"cniVersion": "1.0.0", "name": "rails", "plugins": [
	{"type": "macvlan", "master": "eth1", "ipam": {"type": "host-local", "subnet": "10.61.0.0/24", "rangeStart": "10.61.0.40"}},
	{"type": "rdma-netdev", "attach": "rdma-only", "rdmaDevice": "mlx5_1"}]}'
check "ctr run --cni: behind the reference plugin" run chained ip -o addr show dev eth0
contains "the container has that plugin's address" 'inet 10.61.0.4[0-9]/24' "$checked"

network '{"cniVersion": "1.0.0", "name": "rails", "plugins": [
	{"type": "rdma-netdev", "attach": "macvlan", "master": "nowhere"}]}'
refuses "a mistake reaches the one who runs the container" 'netdev nowhere does not exist' run wrong ip link
wait_for 30 eval '[ "$(ip -o link show type macvlan | grep -c .)" = 0 ]' || true
as_before "the host is as it was" "$before"
