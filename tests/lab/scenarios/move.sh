# A NIC and its HCA go into a pod and return unharmed, with RDMA's namespaces shared and exclusive
# lab: nics=3 memory=768 timeout=600 binaries=rdma-netdev,rdma-ipam,rdmactl
# shellcheck shell=bash disable=SC2016,SC2154

node_policy '{"allow": {"unallocated": true}}'

# Rails as an administrator leaves them: addresses, policy routing, tuned.
rail() {
	local nic=$1 name=$2 hca=$3 net=$4
	ip link set "$nic" name "$name"
	ip link set "$name" mtu 4200 alias "rail $net" txqueuelen 2000
	ip link property add dev "$name" altname "pf-of-$hca"
	make_hca "$name" "$hca"
	ip addr add "10.$net.0.1/24" dev "$name"
	ip addr add "10.$net.0.2/32" dev "$name"
	ip addr add "fd00:$net::1/64" dev "$name" nodad
	ip route add "10.$net.8.0/21" via "10.$net.0.254" dev "$name" metric 50
	ip route add default via "10.$net.0.254" dev "$name" table "10$net"
	ip -6 route add "fd00:99:$net::/48" via "fd00:$net::fe" dev "$name"
	ip rule add from "10.$net.0.1" lookup "10$net" priority "10$net"
	ip neigh add "10.$net.0.200" lladdr 02:00:00:00:00:c8 dev "$name" nud permanent
	echo 2 >"/proc/sys/net/ipv4/conf/$name/rp_filter"
	echo 1 >"/proc/sys/net/ipv4/conf/$name/arp_ignore"
	echo 0 >"/proc/sys/net/ipv6/conf/$name/accept_ra"
}
whole_state() {
	host_state
	ip -d -o link show | sed 's/ parentbus.*//'
	grep -rs . /proc/sys/net/ipv[46]/conf/rail* | sort || true
}

rail eth1 rail1 mlx5_1 61
rail eth2 rail2 mlx5_2 62
pci=(- 0000:02:00.0 0000:03:00.0)
# The directory is the plugin's to make; /var/run is not a link to /run here.
info_file() { echo "/var/run/k8s.cni.cncf.io/devinfo/cni/rails-pod$1_net1"; }
network() {
	echo '{"cniVersion": "1.0.0", "name": "rails", "type": "rdma-netdev", "attach": "move",
		"deviceID": "'"${pci[$1]}"'", "mtu": 2000,
		"runtimeConfig": {"CNIDeviceInfoFile": "'"$(info_file "$1")"'"},
		"ipam": {"type": "rdma-ipam", "range": "192.168.60.0/24", "range_start": "192.168.60.10"}}'
}
# The address is not known before: one that was free a moment ago rests for a while.
address=()
add() { cni rdma-netdev ADD "pod$1" "pod$1" net1 "$(network "$1")" 2>"$LAB_OUT/add.$1"; }
del() { cni rdma-netdev DEL "pod$1" "pod$1" net1 "$(network "$1")"; }
in_pod() { ip netns exec "pod$1" "${@:2}"; }
in_pod_gid() { in_pod "$1" bash -c ". /lab/guest/lab.sh; gid_index $2 $3"; }

write_bw() {
	in_pod 2 timeout 90 ib_write_bw -u 18 -d mlx5_2 -x "$(in_pod_gid 2 mlx5_2 "${address[2]}")" -n 300 &
	wait_for 30 in_pod 2 grep -q ':4853 ' /proc/net/tcp /proc/net/tcp6
	in_pod 1 timeout 90 ib_write_bw -u 18 -d mlx5_1 -x "$(in_pod_gid 1 mlx5_1 "${address[1]}")" -n 300 "${address[2]}"
	wait $!
}

for mode in shared exclusive; do
	# The kernel changes the mode only while there is one network namespace.
	wait_for 30 rdma system set netns $mode
	before=$(whole_state)
	for pod in 1 2; do
		ip netns add pod$pod
		ip -n pod$pod link set lo up
		check "$mode: the NIC goes into pod $pod" add $pod
		result=$checked
		refuses "$mode: ADD warns of nothing" '^$' grep -i warn "$LAB_OUT/add.$pod"
		info=$(info_file $pod)
		address[pod]=$(jq -r '.ips[0].address' <<<"$result" | cut -d/ -f1)
		contains "$mode: it is net1 there, with its address" "inet ${address[pod]}/24" "$(in_pod $pod ip -o addr show dev net1)"
		equal "$mode: Multus gets function, RDMA device and GID" \
			"${pci[pod]} mlx5_$pod ${address[pod]} $(in_pod_gid $pod mlx5_$pod "${address[pod]}")" \
			"$(jq -r '"\(.pci."pci-address") \(.pci."rdma-device") \(."rdma-gids"[0] | "\(.address) \(.gidIndex)")"' "$info")"
		contains "$mode: with the configured MTU" 'mtu 2000 ' "$(in_pod $pod ip -o link show net1)"
		refuses "$mode: it has left the host" 'does not exist' ip link show rail$pod
		check "$mode: CHECK agrees" cni rdma-netdev CHECK pod$pod pod$pod net1 \
			"$(jq -c --argjson result "$result" '. + {prevResult: $result}' <<<"$(network $pod)")"
	done
	hcas_on_host=$(rdma link show | grep -c .) || true
	case $mode in
	shared) equal "shared: the HCAs are seen everywhere" 2 "$hcas_on_host" ;;
	exclusive)
		equal "exclusive: the HCAs have left the host" 0 "$hcas_on_host"
		contains "exclusive: a pod has its HCA and no other" '^link mlx5_1/1 [^\n]* netdev net1 $' "$(in_pod 1 rdma link show)"
		;;
	esac
	wait_for 30 in_pod_gid 1 mlx5_1 "${address[1]}"
	wait_for 30 in_pod_gid 2 mlx5_2 "${address[2]}"
	check "$mode: the pods reach each other" in_pod 1 ping -c 2 -W 5 "${address[2]}"
	check "$mode: the pods write to each other's memory" write_bw

	check "$mode: pod 1 ends as it should" del 1
	ip netns delete pod1
	ip netns delete pod2
	wait_for 30 eval '[ "$(rdma link show | grep -c mlx5_)" = 2 ]'
	check "$mode: pod 2's namespace is gone before DEL" del 2
	check "$mode: DEL once more is no error" del 2
	wait_for 20 settled rail1
	wait_for 20 settled rail2
	as_before "$mode: both NICs are as they were: names, MTU, addresses, routes, rules, neighbours, tuning" \
		"$before" whole_state
	equal "$mode: no lease is left" "[]" "$(rdmactl addresses --json | jq -c .leases)"
	equal "$mode: no attachment is left" "" "$(find /var/lib/rdma-netdev/attachments -type f)"
done
