# Two nodes take addresses from one directory on NFS at the same time: none twice, none lost
# lab: guests=2 memory=768 timeout=600 binaries=rdma-agent,rdma-ipam,rdmactl
# shellcheck shell=bash disable=SC2154

store=/mnt/addresses
subnet=192.168.50.0/24
network='{"cniVersion": "1.0.0", "name": "rails", "type": "rdma-netdev",
	"ipam": {"type": "rdma-ipam", "range": "192.168.50.0/24", "gateway": "192.168.50.1"}}'
node_policy "$(shared_store $store '{"ipam": {"cooldown": "2s"}}')"
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

start_agent
unmounted() { (add 1 2>&1 || true) | grep 'FORMAT: .* mount the share'; }
check "a share that is not mounted is named, with what to do" wait_for 60 unmounted

for version in 4.2 3; do
	meet "start-$version"
	mount_store $version soft 192.168.10.1 /srv/store $store
	# Once for all nodes; once more changes nothing.
	[ "$LAB_GUEST" = 2 ] || check "NFS $version: the directory is made ready" rdmactl addresses init
	meet "mounted-$version"

	# The runtime tries again what the agent could not do in time.
	for pod in $(seq 25); do
		wait_for 60 add "$pod"
		add "$pod"
	done >"$LAB_OUT/$version"
	meet "added-$version"
	equal "NFS $version: 50 pods of two nodes have 50 addresses" "50 50" \
		"$(addresses $version | wc -l) $(addresses $version | sort -u | wc -l)"
	equal "NFS $version: asked again, a pod has the same address" "$(sed -n 7p "$LAB_OUT/$version")" "$(add 7)"
	equal "NFS $version: the node sees its leases" 25 "$(leases)"
	mapfile -t own <"$LAB_OUT/$version"
	equal "NFS $version: the directory says that this node owns their addresses" "$(uname -n)" \
		"$(owner_of $store $subnet "${own[@]}" | sort -u)"
	check "NFS $version: fsck finds nothing" rdmactl addresses fsck
	meet "seen-$version"

	for pod in $(seq 25); do
		del "$pod"
	done
	check "NFS $version: a second DEL is no error" del 1
	equal "NFS $version: no lease is left" 0 "$(leases)"
	check "NFS $version: the node gives its parts back" wait_for 60 rdmactl addresses give-back
	meet "given-$version"
	equal "NFS $version: nobody owns an address" "" "$(owners $store $subnet)"
	meet "counted-$version"
	# The agent may be reading it.
	wait_for 60 umount $store
	# The guest that serves it ends last.
	meet "unmounted-$version"
done
