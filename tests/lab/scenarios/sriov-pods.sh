# Virtual functions by the whole way: a pod asks for one, gets it with its HCA, and talks RDMA
# lab: qemu=8.0 nics=0 ports=1 memory=1536 timeout=600 images=pods
# lab: binaries=rdma-device-plugin,rdma-netdev,rdma-ipam,rdmactl standins=kubelet-standin,multus-standin
# lab: device=igb,id=pf,netdev=wire,bus=port0,romfile= netdev=hubport,id=wire,hubid=0
# shellcheck shell=bash disable=SC2016

networks=/lab/manifests/examples/networks
modprobe -a igb igbvf
ip link set eth0 up
echo 2 >/sys/class/net/eth0/device/sriov_numvfs
wait_for 30 test -e /sys/bus/pci/devices/0000:01:00.0/virtfn1/net
for number in 0 1; do
	make_hca "$(ls /sys/bus/pci/devices/0000:01:00.0/virtfn$number/net)" mlx5_$number
done
start_containerd
install_cni $networks
start_kubelet
start_profile exclusive
check "the kubelet learns of both virtual functions" kubelet-standin node --patience 60 --wait rdma/vf=2
whole_state() { host_state | sed 's/ permaddr [0-9a-f:]*//'; }
before=$(whole_state)

declare -A address hca gid
for pod in a b; do
	check "pod $pod runs with one" worker $pod rdma-move-addressed "rdma/vf: 1"
	address[$pod]=$(address_of $pod net1 | cut -d/ -f1)
	contains "pod $pod: its address is of the range" '^192\.168\.112\.' "${address[$pod]}"
	contains "pod $pod: net1 has the network's MTU" 'mtu 9000 ' "$(in_pod $pod ip -o link show net1)"
	hca[$pod]=$(in_pod $pod ibv_devinfo | awk '/^hca_id/ { print $2 }')
	wait_for 30 gid_index "${hca[$pod]}" "${address[$pod]}"
	gid[$pod]=$(gid_index "${hca[$pod]}" "${address[$pod]}")
done
equal "each has the HCA of its own" "mlx5_0 mlx5_1" "$(printf '%s\n' "${hca[@]}" | sort | paste -sd' ')"
refuses "a third pod waits" "insufficient rdma/vf" worker c rdma-move-addressed "rdma/vf: 1"
check "the pods reach each other" in_pod a ping -c 2 -W 10 "${address[b]}"
write_bw() {
	in_pod b ib_write_bw -u 18 -d "${hca[b]}" -x "${gid[b]}" -n 300 &
	wait_for 30 in_pod b grep -q ':4853 ' /proc/net/tcp /proc/net/tcp6
	in_pod a ib_write_bw -u 18 -d "${hca[a]}" -x "${gid[a]}" -n 300 "${address[b]}"
	wait $!
}
check "the pods write to each other's memory" write_bw
check "both end" kubelet-standin delete-pod a b
as_before "the host is as before" "$before" whole_state
equal "no lease is left" "[]" "$(rdmactl addresses --json | jq -c .leases)"
check "the kubelet learns that both are back" kubelet-standin node --patience 60 --wait rdma/vf=2
