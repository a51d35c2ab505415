# Virtual functions: discovered with their physical function, one goes into each of two pods and comes home
# lab: qemu=8.0 nics=0 ports=1 memory=768 timeout=600 binaries=rdma-device-plugin,rdma-netdev,rdma-ipam
# lab: device=igb,id=pf,netdev=wire,bus=port0,romfile= netdev=hubport,id=wire,hubid=0
# shellcheck shell=bash disable=SC2016,SC2154

modprobe -a igb igbvf
ip link set eth0 up
echo 2 >/sys/class/net/eth0/device/sriov_numvfs
wait_for 30 test -e /sys/bus/pci/devices/0000:01:00.0/virtfn1/net
vf=() nic=()
for number in 0 1; do
	vf[number]=$(basename "$(readlink -f /sys/bus/pci/devices/0000:01:00.0/virtfn$number)")
	nic[number]=$(ls "/sys/bus/pci/devices/${vf[number]}/net")
	make_hca "${nic[number]}" "mlx5_$number"
done
rdma-device-plugin discover
seen=$(rdma-device-plugin discover --json)
equal "virtual functions are told apart, with their physical function" \
	"$(printf '%s vf 0000:01:00.0\n' "${vf[@]}" | sort)" \
	"$(jq -r '.hcas[] | "\(.id) \(.function) \(.pf)"' <<<"$seen" | sort)"

before=$(host_state)
network() {
	echo '{"cniVersion": "1.0.0", "name": "vfs", "type": "rdma-netdev", "attach": "move", "deviceID": "'"${vf[$1]}"'",
		"ipam": {"type": "rdma-ipam", "range": "192.168.60.0/24"}}'
}
address=()
for number in 0 1; do
	ip netns add pod$number
	check "virtual function $number goes into a pod" cni rdma-netdev ADD pod$number pod$number net1 "$(network $number)"
	address[number]=$(ip -n pod$number -4 -o addr show dev net1 | awk '{ sub("/.*", "", $4); print $4 }')
done
check "the pods reach each other" ip netns exec pod0 ping -c 2 -W 10 "${address[1]}"
for number in 0 1; do
	check "virtual function $number comes home" cni rdma-netdev DEL pod$number pod$number net1 "$(network $number)"
	ip netns delete pod$number
	wait_for 30 settled "${nic[number]}"
done
as_before "both are as they were" "$before"
