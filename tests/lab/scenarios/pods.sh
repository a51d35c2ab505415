# The whole way: two pods ask for an HCA, get it, an interface and an address, and talk RDMA
# lab: nics=2 memory=1536 timeout=600 images=pods
# lab: binaries=rdma-device-plugin,rdma-netdev,rdma-ipam,rdmactl standins=kubelet-standin,multus-standin
# shellcheck shell=bash disable=SC2016,SC2154

# The names that the shipped manifests use.
hca=mlx5_0 netdev=ens2f0 resource=rdma/hca_shared_devices_a
manifests=/lab/manifests/examples/perftest

ip link set eth0 name $netdev
ip link set $netdev mtu 4200
make_hca $netdev $hca
# Another HCA, in no pool: no pod may get it.
make_hca eth1 mlx5_1
start_containerd
install_cni $manifests
start_kubelet
start_daemon $manifests/pools.json
check "the kubelet learns of the HCA" kubelet-standin node --patience 90 --wait $resource=63
before=$(host_state)

step "the node's HCAs, as rdma-device-plugin sees them"
show rdmactl discover --config-file $manifests/pools.json
step "what the node offers to pods"
show kubelet-standin node

# Newer kernels have the node of the subnet manager for InfiniBand ports alone.
wanted=$(cd /dev/infiniband && echo issm*0 rdma_cm umad0 uverbs0)
wanted=${wanted#'issm*0 '}
address=()
check "both pods run" kubelet-standin run-pod $manifests/pod-1.yaml $manifests/pod-2.yaml
step "two pods, each asking for $resource: 1"
show cat <<<"$checked"
in_pod() { kubelet-standin exec "rdma-test-pod-$1" -- "${@:2}"; }
for pod in 1 2; do
	link=$(in_pod $pod ip addr show net1)
	hcas=$(in_pod $pod ibv_devinfo)
	nodes=$(in_pod $pod sh -c 'cd /dev/infiniband && echo *')
	address[pod]=$(awk '$1 == "inet" { sub("/.*", "", $2); print $2 }' <<<"$link")
	tell "    rdma-test-pod-$pod: ip addr show net1; ibv_devinfo"
	show grep -v valid_lft <<<"$link"
	show grep -E 'hca_id|node_guid|state|active_mtu|link_layer' <<<"$hcas"
	contains "pod $pod: net1 has an address of the network's range" '^192\.168\.111\.[0-9]+$' "${address[pod]}"
	contains "pod $pod: net1 has the master's MTU" 'mtu 4200 ' "$link"
	equal "pod $pod sees its HCA and no other" $hca "$(awk '/^hca_id/ { print $2 }' <<<"$hcas")"
	equal "pod $pod has the nodes of its HCA and no other" "$wanted" "$nodes"
	check "pod $pod: its address is a GID of the HCA" wait_for 30 gid_index $hca "${address[pod]}"
done
equal "the pods' addresses differ" 2 "$(printf '%s\n' "${address[@]}" | sort -u | wc -l)"

step "their addresses: leases, and entries of the HCA's GID table"
show rdmactl addresses
for pod in 1 2; do
	show eval 'gids $hca | grep "^$(gid_index $hca "${address[pod]}") "'
done

step "ping, pod 1 to pod 2"
check "the pods reach each other" in_pod 1 ping -c 3 -W 5 "${address[2]}"
show tail -n 2 <<<"$checked"

step "ib_write_bw, pod 1 to pod 2"
write_bw() {
	in_pod 2 ib_write_bw -u 18 -d $hca -x "$(gid_index $hca "${address[2]}")" -n 500 &
	wait_for 30 in_pod 2 grep -q ':4853 ' /proc/net/tcp /proc/net/tcp6
	in_pod 1 ib_write_bw -u 18 -d $hca -x "$(gid_index $hca "${address[1]}")" -n 500 "${address[2]}"
	wait $!
}
check "the pods write to each other's memory" write_bw
show eval 'grep -A 1 "#bytes" <<<"$checked" | tail -n 2'

step "the same as an administrator does it: rdmactl verify"
cat >/tmp/kubectl <<'SH'
#!/bin/sh
[ "$1" = exec ] && shift && exec kubelet-standin exec "$@"
SH
chmod +x /tmp/kubectl
verify() { rdmactl verify --kubectl /tmp/kubectl --timeout 60 "$@"; }
check "verify finds nothing wrong" verify pod:rdma-test-pod-1 pod:rdma-test-pod-2
show cat <<<"$checked"
contains "verify: packets, connections and writes" \
	'ping +pass .*rping +pass .*write-bw +unknown .*data was transferred' "$(tr '\n' ' ' <<<"$checked")"
check "verify: as JSON" verify --json --only write-bw pod:rdma-test-pod-1 pod:rdma-test-pod-2
equal "verify: the table's line" 65536 "$(jq '.measurements[0].rows[0].bytes' <<<"$checked")"
refuses "verify: a pod without the resource" 'no port of an RDMA device mlx5_9' \
	verify pod:rdma-test-pod-1 pod:rdma-test-pod-2 --device mlx5_9

step "both pods deleted"
check "the pods end" kubelet-standin delete-pod rdma-test-pod-1 rdma-test-pod-2
as_before "links, addresses, routes and GIDs are as before" "$before"
after=$(host_state)
leases=$(rdmactl addresses --json | jq -c .leases)
equal "no lease is left" "[]" "$leases"
[ "$before" != "$after" ] || tell "    the node's links, addresses, routes and GIDs: as before ($(wc -l <<<"$before") lines compared)"
[ "$leases" != "[]" ] || tell "    leases: none"
