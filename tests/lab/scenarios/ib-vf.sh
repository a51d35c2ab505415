# InfiniBand virtual functions: GUIDs by their physical function, one goes into each of two pods and returns
# lab: qemu=8.0 nics=0 ports=1 memory=768 timeout=600 binaries=rdma-device-plugin,rdma-netdev,rdma-ipam,rdmactl
# lab: device=igb,id=pf,netdev=wire,bus=port0,romfile= netdev=hubport,id=wire,hubid=0
# shellcheck shell=bash disable=SC2016,SC2154

node_policy '{"allow": {"unallocated": true}}'
modprobe -a igb igbvf
make_ib_hca eth0 mlx5_0
echo 2 >/sys/bus/pci/devices/0000:01:00.0/sriov_numvfs
wait_for 30 test -e /sys/bus/pci/devices/0000:01:00.0/virtfn1/net
# A VF reads its GUIDs when its driver starts.
for number in 0 1; do
	ip link set ib0 vf $number node_guid 00:11:22:33:44:55:66:${number}0
	ip link set ib0 vf $number port_guid 00:11:22:33:44:55:66:${number}1
	ip link set ib0 vf $number state auto
done
vf=()
for number in 0 1; do
	vf[number]=$(basename "$(readlink -f /sys/bus/pci/devices/0000:01:00.0/virtfn$number)")
	# The PF's cable has taken its name along.
	ip link set "$(ls "/sys/bus/pci/devices/${vf[number]}/net")" name vf$number
	make_ib_hca vf$number "mlx5_$((number + 1))"
done
equal "a VF has the port GUID that its PF says" fe80:0000:0000:0000:0011:2233:4455:6601 \
	"$(cat /sys/class/infiniband/mlx5_1/ports/1/gids/0)"
seen=$(rdmactl discover --json)
equal "VFs are distinguished, with their PF" "$(printf '%s vf 0000:01:00.0\n' "${vf[@]}" | sort)" \
	"$(jq -r '.hcas[] | select(.function == "vf") | "\(.id) \(.function) \(.pf)"' <<<"$seen" | sort)"
before=$(host_state)
contains "the PF holds the GUIDs" 'vf 0 .*NODE_GUID 00:11:22:33:44:55:66:00, PORT_GUID 00:11:22:33:44:55:66:01' "$before"

network() {
	echo '{"cniVersion": "1.0.0", "name": "vfs", "type": "rdma-netdev", "attach": "move", "deviceID": "'"${vf[$1]}"'",
		"ipam": {"type": "rdma-ipam", "range": "192.168.60.0/24"}}'
}
address=()
for number in 0 1; do
	ip netns add pod$number
	check "VF $number goes into a pod" cni rdma-netdev ADD pod$number pod$number net1 "$(network $number)"
	address[number]=$(ip -n pod$number -4 -o addr show dev net1 | awk '{ sub("/.*", "", $4); print $4 }')
	carries net1 ip netns exec pod$number
	contains "VF $number: its GUID is in the interface's address" "00:11:22:33:44:55:66:${number}1\$" \
		"$(ip netns exec pod$number cat /sys/class/net/net1/address)"
done
equal "discover shows both while pods have their netdevs" "$(printf '%s\n' "${vf[@]}" | sort)" \
	"$(rdmactl discover --json | jq -r '.hcas[] | select(.function == "vf").id' | sort)"
check "the pods reach each other" ip netns exec pod0 ping -c 2 -W 10 "${address[1]}"
check "VF 0 returns" cni rdma-netdev DEL pod0 pod0 net1 "$(network 0)"
ip netns delete pod0
ip netns delete pod1
check "VF 1 does, though its namespace ended" cni rdma-netdev DEL pod1 pod1 net1 "$(network 1)"
as_before "both are as they were, with what the PF holds of them" "$before"

step "a GUID for the pod"
# What the driver of an HCA does when it starts: the HCA of a VF is made again on the VF's new netdev.
drive() {
	local number cable
	while nap 0.2; do
		for number in 0 1; do
			cable=$(ls "/sys/bus/pci/devices/${vf[number]}/net" 2>/dev/null | grep '^eth') || continue
			# It does not wait for the netdev, which ADD may take at once.
			ip link set "$cable" name vf$number && { make_ib_hca vf$number "mlx5_$((number + 1))" & } || true
		done
	done
}
before=$(ib_state)
guids=$(ip link show ib0 | grep 'vf 0 ')
own=02:00:00:00:00:00:00:0a
with_guid() { jq -c --arg guid "$1" '. + {args: {cni: {guid: $guid}}}' <<<"$(network 0)"; }
by_runtime() { jq -c --arg guid "$1" '. + {runtimeConfig: {infinibandGUID: $guid}}' <<<"$(network 0)"; }
ip netns add pod0
refuses "the policy does not allow one" 'allow.vf.guid' cni rdma-netdev ADD pod0 pod0 net1 "$(with_guid $own)"
node_policy '{"allow": {"unallocated": true, "vf": {"guid": ["02:00:00:00:00:00:00:00-02:ff:ff:ff:ff:ff:ff:ff", "00:11:22:33:44:55:66:11"]}}}'
refuses "nor one that it does not list" 'allow.vf.guid' cni rdma-netdev ADD pod0 pod0 net1 "$(with_guid 00:11:22:33:44:55:66:12)"
refuses "the GUID of another VF is refused" '0011:2233:4455:6611' cni rdma-netdev ADD pod0 pod0 net1 "$(with_guid 00:11:22:33:44:55:66:11)"
refuses "a GUID of zeros is refused" 'not the GUID of a port' cni rdma-netdev ADD pod0 pod0 net1 "$(with_guid 00:00:00:00:00:00:00:00)"
drive &
driver=$!
check "the VF has the pod's GUID" cni rdma-netdev ADD pod0 pod0 net1 "$(with_guid $own)"
contains "its PF says so" "NODE_GUID $own, PORT_GUID $own" "$(ip link show ib0 | grep 'vf 0 ')"
contains "and the pod's interface" "$own\$" "$(ip netns exec pod0 cat /sys/class/net/net1/address)"
equal "and the RDMA device" 0200:0000:0000:000a "$(cat /sys/class/infiniband/mlx5_1/node_guid)"
carries net1 ip netns exec pod0
check "DEL, which the runtime repeats while the driver starts" wait_for 60 cni rdma-netdev DEL pod0 pod0 net1 "$(with_guid $own)"
equal "the VF has its own GUIDs" "$guids" "$(ip link show ib0 | grep 'vf 0 ')"
as_before "the host is as before" "$before" ib_state
check "another pod gets a GUID by the runtime" cni rdma-netdev ADD pod0 pod0 net1 "$(by_runtime $own)"
contains "its interface has it" "$own\$" "$(ip netns exec pod0 cat /sys/class/net/net1/address)"
ip netns delete pod0
check "DEL after the end of its namespace" cni rdma-netdev DEL pod0 pod0 net1 "$(by_runtime $own)"
equal "the VF has its own GUIDs" "$guids" "$(ip link show ib0 | grep 'vf 0 ')"
as_before "the host is as before" "$before" ib_state

step "its PF is away when the pod ends"
ip netns add pod1
check "a pod gets a GUID" cni rdma-netdev ADD pod1 pod1 net1 "$(with_guid $own)"
ip netns add away
ip link set ib0 netns away
refuses "DEL says which PF" '0000:01:00.0' cni rdma-netdev DEL pod1 pod1 net1 "$(with_guid $own)"
check "the pod ends all the same" cni rdma-netdev DEL pod1 pod1 net1 "$(with_guid $own)"
ip netns delete pod1
ip netns add pod0
refuses "no other pod gets the VF" '0000:01:00.0' cni rdma-netdev ADD pod0 pod0 net1 "$(network 0)"
ip -n away link set ib0 netns 1
ip link set ib0 up
carries ib0
check "the PF is back: another pod gets the VF" cni rdma-netdev ADD pod0 pod0 net1 "$(network 0)"
contains "with the VF's own GUID" "00:11:22:33:44:55:66:01\$" "$(ip netns exec pod0 cat /sys/class/net/net1/address)"
check "DEL" wait_for 60 cni rdma-netdev DEL pod0 pod0 net1 "$(network 0)"
equal "the VF has its own GUIDs" "$guids" "$(ip link show ib0 | grep 'vf 0 ')"
kill $driver
equal "no attachment is left" "" "$(find /var/lib/rdma-netdev/attachments -type f)"
