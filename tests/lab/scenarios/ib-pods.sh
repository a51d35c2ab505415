# Pods on InfiniBand by the whole way: pools by partition and GUID, children and data between two HCAs
# lab: nics=2 fabric=infiniband memory=1536 timeout=600 images=pods
# lab: binaries=rdma-device-plugin,rdma-netdev,rdma-ipam,rdmactl standins=kubelet-standin,multus-standin
# shellcheck shell=bash disable=SC2016,SC2154

networks=/lab/manifests/examples/networks
partitions mlx5_0 0xffff 0x8001 0x8003
partitions mlx5_1 0xffff 0x8001
# By the partition that its port alone is in, and by the port's GUID.
cat >/tmp/config.yaml <<-'CONFIG'
	version: 1
	pools:
	- resource: rdma/ib
	  mode: shared
	  shares: 4
	  linkUp: true
	  select: {linkTypes: [infiniband], pKeys: ["0x8003"]}
	- resource: rdma/compute
	  mode: shared
	  shares: 4
	  select: {guids: ["5054:00ff:fe00:0101"]}
	- resource: rdma/ethernet
	  mode: shared
	  shares: 4
	  select: {linkTypes: [ether]}
CONFIG
mkdir /tmp/compute
cat >/tmp/compute/nads.yaml <<-'NETWORK'
	apiVersion: k8s.cni.cncf.io/v1
	kind: NetworkAttachmentDefinition
	metadata:
	  name: compute
	  annotations:
	    k8s.v1.cni.cncf.io/resourceName: rdma/compute
	spec:
	  config: |
	    {"cniVersion": "1.0.0", "name": "compute", "plugins": [
	      {"type": "rdma-netdev", "attach": "ipoib", "pkey": "0x8001", "mode": "connected",
	       "capabilities": {"deviceID": true, "CNIDeviceInfoFile": true},
	       "ipam": {"type": "rdma-ipam", "range": "192.168.112.0/24", "range_start": "192.168.112.100"}}]}
NETWORK
start_containerd
install_cni $networks /tmp/compute
start_kubelet
start_daemon /tmp/config.yaml
check "the kubelet learns of the HCA of partition 3" kubelet-standin node --patience 90 --wait rdma/ib=4
check "and of the one with that GUID" kubelet-standin node --patience 30 --wait rdma/compute=4
check "none of them is Ethernet" kubelet-standin node --patience 30 --wait rdma/ethernet=0
check "discover" rdmactl discover --config-file /tmp/config.yaml
step "the node's HCAs, as rdma-device-plugin sees them"
show cat <<<"$checked"
contains "discover shows the port's link layer and its IPoIB netdev" 'mlx5_0.*ib0' "$checked"
before=$(host_state)

step "a pod on each HCA, both in partition 1"
check "a pod of rdma/ib runs" worker a rdma-ipoib "rdma/ib: 1"
check "a pod of rdma/compute runs" worker b compute "rdma/compute: 1"
declare -A address
hca=([0]=mlx5_0 [1]=mlx5_1)
number=0
for pod in a b; do
	address[$pod]=$(address_of $pod net1 | cut -d/ -f1)
	contains "pod $pod: net1 has an address of the network's range" '^192\.168\.112\.[0-9]+$' "${address[$pod]}"
	contains "pod $pod: net1 is a child in partition 1" 'ipoib pkey +0x8001' "$(in_pod $pod ip -d -o link show net1)"
	equal "pod $pod sees its HCA and no other" "${hca[number]}" "$(in_pod $pod ibv_devinfo | awk '/^hca_id/ { print $2 }')"
	contains "pod $pod: the port is InfiniBand, with a LID" 'port_lid: +[1-9].*link_layer: +InfiniBand' \
		"$(in_pod $pod ibv_devinfo | tr -s '\n\t' ' ')"
	number=$((number + 1))
done
check "the pods reach each other" in_pod a ping -c 3 -W 5 "${address[b]}"
rping_between() {
	in_pod b timeout 60 rping -s -a "${address[b]}" -C 3 &
	sleep 2
	in_pod a timeout 60 rping -c -a "${address[b]}" -C 3
	wait $!
}
check "rdma_cm resolves the child's address, and data goes" rping_between
write_bw() {
	in_pod b ib_write_bw -u 18 -d mlx5_1 -n 300 &
	wait_for 30 in_pod b grep -q ':4853 ' /proc/net/tcp /proc/net/tcp6
	in_pod a ib_write_bw -u 18 -d mlx5_0 -n 300 "${address[b]}"
	wait $!
}
check "the pods write to each other's memory, by LID" write_bw
step "ib_write_bw, pod a to pod b"
show eval 'grep -A 1 "#bytes" <<<"$checked" | tail -n 2'

step "rdmactl verify between the pods, and preflight of the ports"
cat >/tmp/kubectl <<'SH'
#!/bin/sh
[ "$1" = exec ] && shift && exec kubelet-standin exec "$@"
SH
chmod +x /tmp/kubectl
check "verify finds nothing wrong" rdmactl verify --kubectl /tmp/kubectl --timeout 60 pod:b pod:a
contains "verify: packets, connections and writes" \
	'ping +pass .*rping +pass .*write-bw +unknown .*data was transferred' "$(tr '\n' ' ' <<<"$checked")"
check "preflight of links" rdmactl preflight --all --only L01,L13,L14
contains "preflight: a subnet manager, partitions, node GUIDs" \
	'active, with a subnet manager .*L13 +pass .*L14 ' "$(tr '\n' ' ' <<<"$checked")"

step "a cable is pulled"
machine set_link nic0 off
check "the kubelet is told" kubelet-standin node --patience 30 --wait rdma/ib=0
check "the other HCA is as before" kubelet-standin node --patience 5 --wait rdma/compute=4
machine set_link nic0 on
check "and when it is back" kubelet-standin node --patience 60 --wait rdma/ib=4
carries ib0

check "both pods end" kubelet-standin delete-pod a b
as_before "links, addresses, routes and GIDs are as before" "$before"
equal "no lease is left" "[]" "$(rdmactl addresses --json | jq -c .leases)"
