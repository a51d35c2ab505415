# Late binding on InfiniBand: pods get the HCAs beside their GPUs, with their IPoIB netdevs, and the host gets all back
# lab: topology=1x2x2 fabric=infiniband kernel=ib_core.netns_mode=0 memory=1792 timeout=900 images=pods cdi-containerd=yes
# lab: binaries=rdma-device-plugin,rdma-netdev,rdma-ipam standins=kubelet-standin,multus-standin,gpu-plugin-standin
# shellcheck shell=bash disable=SC2016,SC2154

networks=/lab/manifests/examples/networks
equal "RDMA devices have namespaces of their own" "netns exclusive" "$(rdma system show | grep -o 'netns [a-z]*')"
declare -A pci
for nic in 0 1 2 3; do
	pci[mlx5_$nic]=$(basename "$(readlink -f /sys/class/infiniband/mlx5_$nic/device)")
	ip addr add 10.7$nic.0.1/24 dev ib$nic
done
cat >/tmp/config.yaml <<-'CONFIG'
	version: 1
	pools:
	- resource: rdma/nic
	  mode: exclusive
	  binding: late
	  environment: true
	  select: {linkTypes: [infiniband]}
CONFIG
start_containerd /lab/containerd
install_cni $networks
start_kubelet
start_daemon /tmp/config.yaml
gpu-plugin-standin >"$LAB_OUT/gpu-plugin.log" 2>&1 &
check "the kubelet learns of four slots" kubelet-standin node --patience 90 --wait rdma/nic=4
check "and of two GPUs" kubelet-standin node --patience 60 --wait amd.com/gpu=2
before=$(ib_state)

switch_of() { readlink -f "/sys/bus/pci/devices/$1/../../"; }
is_beside_gpu() { [ "$(switch_of "$(units_of "$1" amd.com/gpu)")" = "$(switch_of "${pci[$(hcas_of "$1")]}")" ]; }

for name in a b; do
	check "pod $name with a GPU and a slot runs" pod_of_nics $name 1 1
	check "pod $name: its HCA is on the switch of its GPU" is_beside_gpu $name
	hca=$(hcas_of $name)
	equal "pod $name: it has that HCA's IPoIB netdev and its address" "10.7${hca#mlx5_}.0.1/24" "$(address_of $name net1)"
	contains "pod $name: its port is active, and InfiniBand" 'PORT_ACTIVE.*link_layer: +InfiniBand' \
		"$(in_pod $name ibv_devinfo -d "$hca" | tr -s '\n\t' ' ')"
	equal "pod $name: the environment names it for NCCL" "=$hca:1" "$(in_pod $name sh -c 'echo "$NCCL_IB_HCA"')"
done
check "a pod with the two other HCAs runs" pod_of_nics c 2 0
equal "it has both" 2 "$(hcas_of c | wc -w)"
equal "and two netdevs" "eth0 lo net1 net2" "$(in_pod c sh -c 'cd /sys/class/net && echo *')"
equal "no HCA is two pods'" 4 "$(for name in a b c; do hcas_of $name; done | tr ' ' '\n' | sort -u | wc -l)"
equal "no IPoIB netdev is left on the host" "" "$(ip -o link show type ipoib)"
check "all three end" kubelet-standin delete-pod a b c
as_before "the host has all four HCAs and netdevs, as before" "$before" ib_state
equal "no CDI file is left" 0 "$(find /var/run/cdi -name 'rdma-device-plugin-slot_*' | wc -l)"
check "the kubelet has four slots again" kubelet-standin node --patience 60 --wait rdma/nic=4
