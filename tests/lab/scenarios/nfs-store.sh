# Two nodes take addresses from one store on NFS at the same time: none twice, none lost
# lab: guests=2 memory=768 timeout=600 binaries=rdma-ipam,rdmactl
# shellcheck shell=bash

store=/var/lib/rdma-netdev/leases
network='{"cniVersion": "1.0.0", "name": "rails", "type": "rdma-netdev",
	"ipam": {"type": "rdma-ipam", "range": "192.168.50.0/24", "gateway": "192.168.50.1"}}'
# A lease needs no interface, only the name of a namespace.
ip netns add pod
ip link set eth0 up
ip addr add "192.168.10.$LAB_GUEST/24" dev eth0
[ "$LAB_GUEST" = 2 ] || serve_store /srv/store 192.168.10.0/24
mkdir -p $store

add() { cni rdma-ipam ADD "$(uname -n)-$1" pod net1 "$network" | jq -r '.ips[0].address'; }
del() { cni rdma-ipam DEL "$(uname -n)-$1" pod net1 "$network"; }
leases() { rdmactl addresses --json | jq '.leases | length'; }
addresses() { cat /lab/out/*/"$1"; }

for version in 4.2 3; do
	meet "start-$version"
	mount_store $version soft 192.168.10.1 /srv/store $store
	meet "mounted-$version"

	for pod in $(seq 25); do
		add "$pod"
	done >"$LAB_OUT/$version"
	meet "added-$version"
	equal "NFS $version: 50 pods of two nodes have 50 addresses" "50 50" \
		"$(addresses $version | wc -l) $(addresses $version | sort -u | wc -l)"
	equal "NFS $version: asked again, a pod has the same address" "$(sed -n 7p "$LAB_OUT/$version")" "$(add 7)"
	equal "NFS $version: each node sees the leases of both" 50 "$(leases)"
	meet "seen-$version"

	for pod in $(seq 25); do
		del "$pod"
	done
	check "NFS $version: a second DEL is no error" del 1
	meet "deleted-$version"
	equal "NFS $version: no lease is left" 0 "$(leases)"
	meet "counted-$version"
	umount $store
	# The guest that serves it ends last.
	meet "unmounted-$version"
done
