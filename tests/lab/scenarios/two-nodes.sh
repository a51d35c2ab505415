# Two nodes, a pod on each, addresses from one directory on NFS, RDMA from node to node
# lab: guests=2 memory=1536 timeout=900 images=pods
# lab: binaries=rdma-agent,rdma-device-plugin,rdma-netdev,rdma-ipam,rdmactl standins=kubelet-standin,multus-standin
# shellcheck shell=bash disable=SC2016,SC2154

store=/mnt/addresses subnet=192.168.111.0/24
hca=mlx5_0 netdev=ens2f0 resource=rdma/hca_shared_devices_a
manifests=/lab/manifests/examples/perftest
pod=rdma-test-pod-$LAB_GUEST

ip link set eth0 name $netdev
make_hca $netdev $hca
ip addr add "192.168.10.$LAB_GUEST/24" dev $netdev
[ "$LAB_GUEST" = 2 ] || serve_store /srv/store 192.168.10.0/24
meet served
mkdir -p $store
mount_store 4.2 soft 192.168.10.1 /srv/store $store
start_containerd
install_cni $manifests
node_policy "$(shared_store $store)"
[ "$LAB_GUEST" = 2 ] || rdmactl addresses init
meet made
start_agent
start_kubelet
start_daemon $manifests/pools.json
check "the kubelet learns of the HCA" kubelet-standin node --patience 90 --wait $resource=63
before=$(host_state)
meet ready

check "the pod runs" kubelet-standin run-pod "$manifests/pod-$LAB_GUEST.yaml"
in_pod() { kubelet-standin exec "$pod" -- "$@"; }
address=$(in_pod ip -4 -o addr show dev net1 | awk '{ sub("/.*", "", $4); print $4 }')
echo "$address" >"$LAB_OUT/address"
wait_for 20 gid_index $hca "$address"
meet running
equal "the pods of both nodes have different addresses" 2 "$(sort -u /lab/out/*/address | wc -l)"
equal "the node sees the lease of its pod" "$address" "$(rdmactl addresses --json | jq -r '.leases[].address')"
equal "the directory says that this node owns its address" "$(uname -n)" "$(owner_of $store $subnet "$address")"

# The first node serves, the second writes.
if [ "$LAB_GUEST" = 1 ]; then
	in_pod ib_write_bw -u 18 -d $hca -x "$(gid_index $hca "$address")" -n 500 &
	wait_for 60 in_pod grep -q ':4853 ' /proc/net/tcp /proc/net/tcp6
	meet serving
	wait $!
	pass "the pod was written to"
else
	server=$(cat /lab/out/1/address)
	check "the pods reach each other" in_pod ping -c 3 -W 5 "$server"
	meet serving
	check "the pod writes to the other node's memory" \
		in_pod ib_write_bw -u 18 -d $hca -x "$(gid_index $hca "$address")" -n 500 "$server"
fi
meet written

check "the pod ends" kubelet-standin delete-pod "$pod"
meet ended
# Neighbours that the kernel learns are not part of this state.
as_before "links, addresses, routes and GIDs are as before" "$before"
equal "no lease is left" "[]" "$(rdmactl addresses --json | jq -c .leases)"
meet counted
