# Virtual functions: discovered with their physical function, one goes into each of two pods and returns
# lab: qemu=8.0 nics=0 ports=1 memory=768 timeout=600 binaries=rdma-device-plugin,rdma-netdev,rdma-ipam,rdmactl
# lab: device=igb,id=pf,netdev=wire,bus=port0,romfile= netdev=hubport,id=wire,hubid=0
# shellcheck shell=bash disable=SC2016,SC2154

node_policy '{"allow": {"unallocated": true}}'

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
rdmactl discover
seen=$(rdmactl discover --json)
equal "virtual functions are distinguished, with their physical function" \
	"$(printf '%s vf 0000:01:00.0\n' "${vf[@]}" | sort)" \
	"$(jq -r '.hcas[] | "\(.id) \(.function) \(.pf)"' <<<"$seen" | sort)"

ip link set eth0 vf 0 spoofchk off
ip link set eth0 vf 0 trust on
# What the driver of a virtual function calls its burnt-in address is whatever it had at a reset.
whole_state() { host_state | sed 's/ permaddr [0-9a-f:]*//'; }
before=$(whole_state)
contains "the physical function holds what was set" 'vf 0 .*spoof checking off.*trust on' "$before"
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
# What a pod and others do to it meanwhile is held by the physical function, and outlasts the pod.
ip -n pod0 link set net1 address 02:00:00:00:00:07
for change in "spoofchk on" "trust off" "vlan 7"; do
	# shellcheck disable=SC2086 # words
	ip link set eth0 vf 0 $change
done
contains "it is changed" 'vf 0 .*vlan 7.*spoof checking on.*trust off' "$(ip -o link show eth0)"
check "virtual function 0 returns" cni rdma-netdev DEL pod0 pod0 net1 "$(network 0)"
ip netns delete pod0
ip -n pod1 link set net1 address 02:00:00:00:00:08
ip netns delete pod1
check "virtual function 1 does, though its namespace died" cni rdma-netdev DEL pod1 pod1 net1 "$(network 1)"
for number in 0 1; do wait_for 30 settled "${nic[number]}"; done
as_before "both are as they were, with what the physical function holds of them" "$before" whole_state

step "settings that a network asks for"
with() { jq -c ". + $1" <<<"$(network 0)"; }
settings='{"vlan": 100, "vlanQoS": 3, "trust": "off", "spoofchk": "on", "max_tx_rate": 500, "mac": "02:00:00:00:00:21"}'
vf0() { ip -o link show eth0 | sed 's/.*\(vf 0 .*\)vf 1 .*/\1/'; }
ip netns add pod0
refuses "the policy does not allow one" 'allow.vf.vlan' cni rdma-netdev ADD pod0 pod0 net1 "$(with "$settings")"
node_policy '{"allow": {"unallocated": true, "vf": {"vlan": ["100-199"], "vlanQoS": true, "vlanProto": true,
	"trust": true, "spoofchk": true, "link_state": true, "max_tx_rate": true, "mac": true}}}'
refuses "nor a VLAN that it does not list" 'allow.vf.vlan' \
	cni rdma-netdev ADD pod0 pod0 net1 "$(with '{"vlan": 200}')"
refuses "the driver has no link state, the kernel says" 'link state disable: .*not supported' \
	cni rdma-netdev ADD pod0 pod0 net1 "$(with '{"vlan": 100, "link_state": "disable"}')"
refuses "nor VLANs of 802.1ad" '802.1ad: .*not supported' \
	cni rdma-netdev ADD pod0 pod0 net1 "$(with '{"vlan": 100, "vlanProto": "802.1ad"}')"
as_before "what was set before is restored" "$before" whole_state
check "the VF gets its settings" cni rdma-netdev ADD pod0 pod0 net1 "$(with "$settings")"
attached=$(with "$settings" | jq -c --argjson result "$(grep '^{' <<<"$checked")" '. + {prevResult: $result}')
contains "its PF says so" \
	'02:00:00:00:00:21.*vlan 100, qos 3.*tx rate 500.*spoof checking on.*trust off' "$(vf0)"
equal "the pod has the MAC address" 02:00:00:00:00:21 "$(ip netns exec pod0 cat /sys/class/net/net1/address)"
check "CHECK compares" cni rdma-netdev CHECK pod0 pod0 net1 "$attached"
ip link set eth0 vf 0 spoofchk off
refuses "and names what is lost" 'has lost spoof check on' cni rdma-netdev CHECK pod0 pod0 net1 "$attached"
check "it returns" cni rdma-netdev DEL pod0 pod0 net1 "$(with "$settings")"
wait_for 30 settled "${nic[0]}"
cat >/usr/lib/cni/killer <<-'X'
	#!/bin/bash
	echo "$CNI_COMMAND" >>/tmp/killer
	[ "$CNI_COMMAND" != ADD ] || kill -KILL $PPID
X
chmod +x /usr/lib/cni/killer
node_policy "$(jq -c '.allow.ipam = ["killer", "rdma-ipam"]' /etc/rdma-netdev/policy.json)"
killed=$(with "$settings" | jq -c '.ipam = {type: "killer"}')
cni rdma-netdev ADD pod0 pod0 net1 "$killed" && fail "an ADD lives on after SIGKILL"
check "an ADD that was killed while its IPAM ran is undone" cni rdma-netdev DEL pod0 pod0 net1 "$killed"
equal "its IPAM is asked to release" "ADD DEL" "$(paste -sd' ' /tmp/killer)"
as_before "it is as it was" "$before" whole_state

step "the physical function is away when the pod ends"
ip netns add pf
check "a pod gets settings" cni rdma-netdev ADD pod0 pod0 net1 "$(with '{"trust": "off", "vlan": 100}')"
ip link set eth0 netns pf
refuses "DEL says which PF" '0000:01:00.0' cni rdma-netdev DEL pod0 pod0 net1 "$(network 0)"
check "the pod ends all the same" cni rdma-netdev DEL pod0 pod0 net1 "$(network 0)"
ip netns delete pod0
ip netns add pod0
refuses "no other pod gets the VF" '0000:01:00.0' cni rdma-netdev ADD pod1 pod0 net1 "$(network 0)"
ip -n pf link set eth0 netns 1
ip link set eth0 up
check "then the next ADD restores it" cni rdma-netdev ADD pod1 pod0 net1 "$(network 0)"
contains "without the settings" 'link/ether.*spoof checking off.*trust on' "$(vf0)"
check "it returns" cni rdma-netdev DEL pod1 pod0 net1 "$(network 0)"
