# InfiniBand NICs go into pods and return unharmed, with RDMA's namespaces shared and exclusive
# lab: nics=2 fabric=infiniband memory=640 timeout=600 binaries=rdma-netdev,rdma-ipam,rdmactl
# shellcheck shell=bash disable=SC2016,SC2154

# Nothing but the allocation is waived: a port's IPoIB netdev is hardware.
node_policy '{"allow": {"unallocated": true}}'
in_pod() { ip netns exec "pod$1" "${@:2}"; }

# rail NETDEV NUMBER KEYS…: as an administrator leaves it, with these keys of IPoIB.
rail() {
	local name=rail$2 net=6$2
	ip link set "$1" down
	ip link set "$1" name "$name" alias "rail $2" txqueuelen 300
	ip link set "$name" type ipoib "${@:3}"
	ip link set "$name" mtu 2044
	ip link property add dev "$name" altname "port-of-mlx5_$2"
	echo 2 >"/proc/sys/net/ipv4/conf/$name/rp_filter"
	echo 0 >"/proc/sys/net/ipv6/conf/$name/accept_ra"
	ip link set "$name" up
	ip addr add "10.$net.0.1/24" dev "$name"
	ip addr add "fd00:$net::1/64" dev "$name" nodad
	ip route add "10.$net.8.0/21" via "10.$net.0.254" dev "$name" metric 50
	ip route add default via "10.$net.0.254" dev "$name" table "10$net"
	ip rule add from "10.$net.0.1" lookup "10$net" priority "10$net"
	carries "$name"
	wait_for 20 grep -q " $name\$" /proc/net/if_inet6
}
whole_state() {
	ib_state
	ip -d -o link show type ipoib | sed -E 's/^[0-9]+: //; s/(link\/infiniband )[0-9a-f:]{11}/\1/; s/ parentbus.*//'
	grep -rs . /proc/sys/net/ipv[46]/conf/rail* | sort || true
}
pci=(0000:01:00.0 0000:02:00.0)
network() {
	echo '{"cniVersion": "1.0.0", "name": "rails", "type": "rdma-netdev", "attach": "move", "deviceID": "'"${pci[$1]}"'",
		"ipam": {"type": "rdma-ipam", "range": "192.168.60.0/24", "range_start": "192.168.60.10"}}'
}
add() { cni rdma-netdev ADD "pod$1" "pod$1" net1 "$(network "$1")" 2>"$LAB_OUT/add.$1"; }
del() { cni rdma-netdev DEL "pod$1" "pod$1" net1 "$(network "$1")"; }
hcas() { rdma link show | sed -n 's/^link \([^/]*\).*/\1/p' | paste -sd' '; }
links_of() { in_pod "$1" ip -o link show | sed -E 's/^[0-9]+: ([^:@]*).*/\1/' | paste -sd' '; }
rping_between() {
	in_pod 1 timeout 60 rping -s -a "${address[1]}" -C 3 &
	wait_for 30 in_pod 1 rdma resource show cm_id
	sleep 1
	in_pod 0 timeout 60 rping -c -a "${address[1]}" -C 3
	wait $!
}
address=()
modes=(datagram connected)

for mode in shared exclusive; do
	step "$mode"
	if [ $mode = exclusive ]; then
		# The kernel changes the mode only while there is one network namespace.
		remove_fabric
		wait_for 30 rdma system set netns exclusive
		make_fabric
	fi
	rail ib0 0 mode "${modes[0]}" umcast 1
	rail ib1 1 mode "${modes[1]}" umcast 0
	before=$(whole_state)
	for pod in 0 1; do
		ip netns add pod$pod
		ip -n pod$pod link set lo up
		check "$mode: NIC $pod goes into a pod" add $pod
		result=$checked
		refuses "$mode: ADD warns of nothing" '^$' grep -i warn "$LAB_OUT/add.$pod"
		address[pod]=$(jq -r '.ips[0].address' <<<"$result" | cut -d/ -f1)
		equal "$mode: the pod has it, and no second netdev" "lo net1" "$(links_of $pod)"
		contains "$mode: its address is there" "inet ${address[pod]}/24" "$(in_pod $pod ip -o addr show dev net1)"
		equal "$mode: the result has its hardware address of 20 bytes" \
			"$(in_pod $pod cat /sys/class/net/net1/address)" "$(jq -r '.interfaces[0].mac' <<<"$result")"
		contains "$mode: which ends in the port's GUID" "52:54:00:ff:fe:00:01:0$pod\$|50:54:00:ff:fe:00:01:0$pod\$" \
			"$(in_pod $pod cat /sys/class/net/net1/address)"
		contains "$mode: it has the MTU that it had" 'mtu 2044 ' "$(in_pod $pod ip -o link show net1)"
		contains "$mode: and the mode" "mode +${modes[pod]}" "$(in_pod $pod ip -d -o link show net1)"
		check "$mode: CHECK agrees" cni rdma-netdev CHECK pod$pod pod$pod net1 \
			"$(jq -c --argjson result "$result" '. + {prevResult: $result}' <<<"$(network $pod)")"
	done
	equal "$mode: no IPoIB netdev is left on the host" "" "$(ip -o link show type ipoib)"
	case $mode in
	shared) equal "shared: the HCAs are seen everywhere" "mlx5_0 mlx5_1" "$(hcas)" ;;
	exclusive)
		equal "exclusive: the HCAs have left the host" "" "$(hcas)"
		equal "exclusive: a pod has its own" mlx5_0 "$(in_pod 0 rdma link show | sed -n 's/^link \([^/]*\).*/\1/p' | paste -sd' ')"
		;;
	esac
	carries net1 in_pod 0
	carries net1 in_pod 1
	check "$mode: the pods reach each other" in_pod 0 ping -c 2 -W 5 "${address[1]}"
	check "$mode: and by RDMA" rping_between
	# What a pod changes is not left on the host.
	in_pod 0 ip link set net1 down
	in_pod 0 ip link set net1 type ipoib mode connected umcast 0
	in_pod 0 ip link set net1 name mine
	check "$mode: DEL" del 0
	ip netns delete pod0
	ip netns delete pod1
	check "$mode: DEL of a pod whose namespace is gone" del 1
	check "$mode: DEL once more is no error" del 1
	equal "$mode: both HCAs are back" "mlx5_0 mlx5_1" "$(hcas)"
	as_before "$mode: both NICs are as they were, and there is no other" "$before" whole_state
	equal "$mode: no lease is left" "[]" "$(rdmactl addresses --json | jq -c .leases)"
	equal "$mode: no attachment is left" "" "$(find /var/lib/rdma-netdev/attachments -type f)"
	for number in 0 1; do ip rule delete priority 106$number; done
done
