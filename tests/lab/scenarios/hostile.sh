# Hostile networks, hostile pods and odd hosts, with real NICs, HCAs and their return from a dead namespace
# lab: nics=4 memory=768 timeout=900 binaries=rdma-netdev,rdma-ipam,rdmactl
# shellcheck shell=bash disable=SC2016,SC2154

# A rail as an administrator leaves it.
rail() {
	local nic=$1 net=$2
	make_hca "$nic" "mlx5_$net"
	ip link set "$nic" alias "rail $net" mtu 4200
	ip link property add dev "$nic" altname "rail-$net-of-this-node-with-a-long-name"
	ip addr add "10.6$net.0.1/24" dev "$nic"
	ip addr add "fd00:6$net::1/64" dev "$nic" nodad
	ip route add "10.6$net.8.0/24" via "10.6$net.0.254" dev "$nic" metric 50
	ip route add default via "10.6$net.0.254" dev "$nic" table "10$net"
	ip rule add from "10.6$net.0.1" lookup "10$net" priority "10$net"
	ip neigh add "10.6$net.0.200" lladdr 02:00:00:00:00:c8 dev "$nic" nud permanent
}
rail eth1 1
rail eth2 2
ip link set eth3 up
# As Multus says which pod it is; the kubelet, if there were one, would be asked for it.
export CNI_ARGS="IgnoreUnknown=1;K8S_POD_NAMESPACE=lab;K8S_POD_NAME=hostile"
pod() { ip netns add "$1" && ip -n "$1" link set lo up; }
config() { jq -c '{cniVersion: "1.1.0", name: "rails", type: "rdma-netdev"} + .' <<<"$1"; }
add() { cni rdma-netdev ADD "$1" "$1" net1 "$(config "$2")"; }
del() { cni rdma-netdev DEL "$1" "$1" net1 "$(config "$2")"; }
move='{"attach": "move", "device": "eth1"}'
by_unit='{"attach": "move", "deviceID": "0000:02:00.0", "pciBusID": "0000:02:00.0"}'
allowed='{"allow": {"unallocated": true}}'
# All that a pod could change, byte for byte; counters and lifetimes left out. Sorted: neighbours are
# listed in the order of a hash that is chosen anew as their table grows.
whole_state() { parts_of_state | sort; }
parts_of_state() {
	host_state
	ip -d -o link show | sed 's/ parentbus.*//; s/altname/\n&/g'
	# Handle 0 is the kernel's own choice, made anew when a link is set up.
	tc qdisc show | grep -v ' 0: ' || true
	ip nexthop show
	ip neigh show proxy
	ip -6 neigh show proxy
	ip -o maddr show | grep static || true
	grep -rs . /proc/sys/net/ipv[46]/{conf,neigh}/eth[12] | sort || true
	find /var/lib/rdma-netdev/attachments -type f 2>/dev/null || true
	rdmactl addresses --json
}
whole_before=$(whole_state)
unchanged() {
	wait_for 20 settled eth1
	as_before "$1" "$whole_before" whole_state
}
# returned FACT NETWORK COMMAND…: ADD, the commands inside the pod, DEL; all is as before.
returned() {
	local fact=$1 network=$2 command
	shift 2
	pod a
	check "$fact: it goes into the pod" add a "$network"
	for command in "$@"; do
		ip netns exec a bash -c "$command"
	done
	check "$fact: DEL" del a "$network"
	ip netns delete a
	unchanged "$fact: all is as before"
}
# denied FACT PATTERN NETWORK: ADD is refused with these words; nothing has changed.
denied() {
	pod a
	refuses "$1" "$2" add a "$3"
	check "$1: the DEL that follows" del a "$3"
	equal "$1: the pod has no interface of it" "1" "$(ip -n a -o link show | wc -l)"
	ip netns delete a
	unchanged "$1: all is as before"
}
# with_module NAME MODULE: whether the guests' kernel has it; else the fact is skipped by name.
with_module() {
	modprobe "$2" 2>/dev/null && return 0
	skip "$1" "this kernel has no module $2"
	return 1
}

# --- the default policy ------------------------------------------------------------------------

rm -f /etc/rdma-netdev/policy.json
denied "without a kubelet nothing is taken from the host" 'node.sock' "$move"
denied "nor by a unit that the network names" 'node.sock' "$by_unit"
node_policy "$allowed"
denied "a NIC without an RDMA device is not given" 'no RDMA device' '{"attach": "move", "device": "eth3"}'
denied "passthru is not given" 'allow.passthru' '{"attach": "macvlan", "master": "eth1", "mode": "passthru"}'
denied "no program is executed for a tenant" 'allow.ipam' \
	'{"attach": "macvlan", "master": "eth1", "ipam": {"type": "host-device", "device": "eth2"}}'

# --- what others stand on ----------------------------------------------------------------------

# stands_on KIND MODULE PLACES ARGUMENTS…
stands_on() {
	local kind=$1 module=$2 places=$3 where
	shift 3
	with_module "a $kind holds its NIC" "$module" || return 0
	for where in $places; do
		ip link add link eth1 name child0 type "$kind" "$@" || ip link add child0 type "$kind" "$@"
		if [ "$where" = pod ]; then
			pod b
			ip link set child0 netns b
			ip -n b link set child0 up
		fi
		pod a
		refuses "a $kind on the $where holds its NIC" 'eth1' add a "$move"
		check "the DEL of the refused" del a "$move"
		ip netns delete a
		if [ "$where" = pod ]; then
			check "a $kind in another pod is still there" ip -n b link show child0
			ip -n b link delete child0
			ip netns delete b
		else
			check "a $kind on the host is still there" ip link show child0
			ip link delete child0
		fi
	done
	unchanged "a $kind: all is as before"
}
stands_on vlan 8021q host id 7
stands_on macvlan macvlan "host pod" mode bridge
stands_on ipvlan ipvlan "host pod" mode l2
stands_on vxlan vxlan host id 7 dev eth1 dstport 4789

# --- what a pod does to its NIC ----------------------------------------------------------------

returned "names and alias in bytes" "$move" \
	$'ip link set net1 down; ip link set net1 name m\xff\xfe; ip link set m\xff\xfe alias $\'\\xfe\\x1b[31m\'' \
	$'ip link property add dev m\xff\xfe altname $\'\\xfd\'' \
	$'ip link property del dev m\xff\xfe altname rail-1-of-this-node-with-a-long-name; ip link set m\xff\xfe up'
returned "flags, sizes, queueing" "$move" \
	'ip link set net1 mtu 1300 txqueuelen 3' \
	'ip link set net1 allmulticast on multicast off' \
	'ip link set net1 address 02:66:66:66:66:66' \
	'tc qdisc replace dev net1 root handle 66: netem delay 1ms' \
	'tc qdisc add dev net1 clsact' \
	'tc filter add dev net1 ingress protocol ip u32 match ip dst 10.61.0.1/32 classid 1:1' \
	'ip neigh add proxy 10.61.0.66 dev net1; ip maddr add 33:33:00:00:66:66 dev net1'
returned "children of the pod upon it" "$move" \
	'ip link add mv0 link net1 type macvlan mode passthru; ip link set mv0 address 02:66:66:66:66:66; ip link set mv0 up' \
	'ip link del mv0; ip link add link net1 name v7 type vlan id 7; ip link set v7 up'
returned "a decoy with its name and address" "$by_unit" \
	'mac=$(cat /sys/class/net/net1/address 2>/dev/null || ip -j link show net1 | jq -r ".[0].address")
	 ip link set net1 down; ip link set net1 address 02:66:66:66:66:66; ip link set net1 name real
	 ip link add net1 type veth peer name other; ip link set net1 address $mac'

# --- hardware comes back from a dead namespace by itself ------------------------------------------

# died FACT COMMAND…: the commands inside the pod, then its namespace ends before DEL comes.
died() {
	local fact=$1 command
	shift
	pod a
	check "$fact: it goes into the pod" add a "$move"
	for command in "$@"; do
		ip netns exec a bash -c "$command"
	done
	ip netns delete a
	wait_for 30 eval '[ "$(ls -d /sys/class/net/*/device | wc -l)" = 4 ]'
	check "$fact: DEL" del a "$move"
	unchanged "$fact: all is as before"
}
died "a name that is taken on the host" 'ip link set net1 down; ip link set net1 name eth2'
died "a name in bytes" $'ip link set net1 down; ip link set net1 name m\xff'
died "altnames of the host" 'ip link property add dev net1 altname eth2; ip link property add dev net1 altname eth1'
died "address, size and alias of its own" 'ip link set net1 address 02:66:66:66:66:66 mtu 1300 alias eth2'
died "a namespace of the pod's own, which ends with it" \
	'ip netns add inner-of-a; ip link set net1 netns inner-of-a; ip netns exec inner-of-a ip link set net1 name deep; ip netns delete inner-of-a'

pod a
check "a NIC for a namespace below the pod's" add a "$move"
ip netns add inner
ip -n a link set net1 netns inner
if cni rdma-netdev DEL a a net1 "$(config "$move")" 2>"$LAB_OUT/nested"; then
	pass "DEL finds it there"
else
	contains "DEL says what is missing" 'eth1' "$(<"$LAB_OUT/nested")"
	contains "it is still in the journal" '@a@' "$(ls /var/lib/rdma-netdev/attachments)"
fi
ip netns delete inner
wait_for 30 eval '[ "$(ls -d /sys/class/net/*/device | wc -l)" = 4 ]'
check "DEL when that namespace is gone, too" del a "$move"
ip netns delete a
unchanged "a namespace below the pod's: all is as before"

# --- names ---------------------------------------------------------------------------------------

returned "by an altname of more than 15 bytes" '{"attach": "move", "device": "rail-1-of-this-node-with-a-long-name"}' \
	'ip link set net1 down; ip link set net1 name mine; ip link set mine up'
# taken FACT COMMAND…: the commands inside the pod, then its name on the host is another netdev's while
# it returns: it waits under a name that says nothing, up and with its addresses, until that is gone.
taken() {
	local fact=$1 command
	shift
	pod a
	check "$fact: it goes into the pod" add a "$move"
	for command in "$@"; do
		ip netns exec a bash -c "$command"
	done
	if [ $# -gt 0 ]; then
		ip netns delete a
		wait_for 30 eval '[ "$(ls -d /sys/class/net/*/device | wc -l)" = 4 ]'
	fi
	ip link add eth1 type veth peer name other
	check "$fact: DEL with the name taken" del a "$move"
	contains "$fact: it is back, up and under a temporary name" '[0-9]+: rdma-dev[0-9]+: <[^>]*\bUP\b' "$(ip -o link)"
	contains "$fact: it has its address" 'inet 10.61.0.1/24' "$(ip -o addr)"
	equal "$fact: no setting of all interfaces is another" "$general_before" "$(general_settings)"
	ip link delete eth1
	check "$fact: reclaim, with the name free again" rdmactl reclaim
	[ $# -gt 0 ] || ip netns delete a
	wait_for 20 settled eth1
	as_before "$fact: the name is repaired, though the NIC was up" "$taken_before" in_any_order
}
# The kernel fills a GID table from a queue, after the addresses are there: the order is its own.
in_any_order() { whole_state | sed 's/ gid [0-9]* / gid /' | sort; }
taken_before=$(in_any_order)
general_settings() { grep -rs . /proc/sys/net/ipv[46]/conf/{all,default} /proc/sys/net/ipv[46]/neigh/default | sort || true; }
general_before=$(general_settings)
taken "a name that is taken meanwhile"
taken "a name that is taken when the pod died" 'ip link set net1 down; ip link set net1 name uplink'

# --- two VLANs of one NIC, with one address ------------------------------------------------------

# Links in order of their names: one that returns may have another index.
by_name() { whole_state | sed 's/^[0-9]*: //' | sort; }
if with_module "two VLANs of one NIC" 8021q; then
	for id in 7 8; do
		ip link add link eth3 name "v$id" type vlan id "$id"
		ip addr add "10.9.$id.1/24" dev "v$id"
		ip link set "v$id" alias "vlan $id" up
		wait_for 20 eval 'ip -6 addr show dev "v$id" | grep -q fe80'
		wait_for 20 settled "v$id"
	done
	with_vlans=$(by_name)
	pod a
	refuses "a VLAN is not given by default" 'v7' add a '{"attach": "move", "device": "v7"}'
	check "a VLAN that is not given: the DEL that follows" del a '{"attach": "move", "device": "v7"}'
	ip netns delete a
	as_before "a VLAN that is not given: all is as before" "$with_vlans" by_name
	node_policy '{"allow": {"unallocated": true, "virtual": true, "nonRdma": true}}'
	pod a
	refuses "the NIC below two VLANs is not given" 'vlan v[78] is on it' add a '{"attach": "move", "device": "eth3"}'
	check "the NIC below two VLANs: the DEL that follows" del a '{"attach": "move", "device": "eth3"}'
	ip netns delete a
	as_before "the NIC below two VLANs: all is as before" "$with_vlans" by_name
	for id in 7 8; do
		vlan='{"attach": "move", "device": "v'$id'"}'
		pod a
		check "VLAN $id goes into the pod" add a "$vlan"
		contains "it is VLAN $id" "vlan protocol 802.1Q id $id" "$(ip -n a -d link show net1)"
		# The pod makes it resemble the other one.
		ip -n a link set net1 down
		ip -n a link set net1 name "v$((15 - id))" alias "vlan $((15 - id))"
		check "VLAN $id: DEL" del a "$vlan"
		ip netns delete a
		wait_for 20 settled "v$id"
		as_before "VLAN $id is back, and not the other one" "$with_vlans" by_name
	done
	ip link delete v7
	ip link delete v8
	node_policy "$allowed"
	unchanged "without the VLANs all is as before"
fi

# --- a child in a namespace that has no name -------------------------------------------------------

if with_module "an ipvlan in a namespace without a name" ipvlan; then
	unshare -n sleep 1000 &
	nameless=$!
	wait_for 10 eval '[ "$(readlink /proc/$nameless/ns/net)" != "$(readlink /proc/self/ns/net)" ]'
	ip link add child0 link eth1 type ipvlan mode l2
	ip link set child0 netns "$nameless"
	nsenter -t "$nameless" -n ip link set child0 up
	pod a
	refuses "an ipvlan in a namespace without a name holds its NIC" 'eth1 carries a macvlan or ipvlan' add a "$move"
	check "an ipvlan in a namespace without a name: the DEL that follows" del a "$move"
	ip netns delete a
	kill "$nameless"
	wait "$nameless" || true
	unchanged "an ipvlan in a namespace without a name: all is as before"
fi
if with_module "a macvlan beside an ipvlan of ours" ipvlan; then
	pod a
	pod b
	check "an ipvlan of ours" add a '{"attach": "ipvlan", "master": "eth1"}'
	refuses "a macvlan beside an ipvlan of ours is refused by its owner's name" 'ipvlan children .*container a' \
		add b '{"attach": "macvlan", "master": "eth1"}'
	check "a macvlan beside an ipvlan of ours: the DEL that follows" del b '{"attach": "macvlan", "master": "eth1"}'
	check "the ipvlan goes" del a '{"attach": "ipvlan", "master": "eth1"}'
	ip netns delete a
	ip netns delete b
	unchanged "a macvlan beside an ipvlan of ours: all is as before"
fi

# --- exclusive mode --------------------------------------------------------------------------------

wait_for 30 rdma system set netns exclusive
hcas() { rdma link show | sed -n 's/^link \([^/]*\).*/\1/p' | sort | paste -sd' '; }
returned "exclusive mode: the pod renames the RDMA device" "$by_unit" \
	'rdma dev set mlx5_1 name mine; ip link set net1 down; ip link set net1 name m'
equal "exclusive mode: the host has both HCAs under their names" "mlx5_1 mlx5_2" "$(hcas)"
pod a
check "exclusive mode: a NIC whose pod has a namespace of its own" add a "$by_unit"
ip netns add inner
device=$(ip netns exec a rdma dev show | sed -n 's/^[0-9]*: \([^:]*\):.*/\1/p')
ip netns exec a rdma dev set "$device" netns inner
ip netns exec inner rdma dev set "$device" name hidden
if del a "$by_unit" 2>"$LAB_OUT/hidden"; then
	fail "exclusive mode: DEL says that the device is away"
else
	contains "exclusive mode: DEL says that the device is away" 'mlx5_1' "$(cat "$LAB_OUT/hidden")"
fi
contains "exclusive mode: it is still in the journal" '@a@' "$(ls /var/lib/rdma-netdev/attachments)"
ip netns delete inner
wait_for 30 eval '[ "$(hcas | wc -w)" = 2 ]'
check "exclusive mode: DEL when that namespace is gone, too" del a "$by_unit"
ip netns delete a
equal "exclusive mode: it is back under its name" "mlx5_1 mlx5_2" "$(hcas)"
unchanged "exclusive mode: renamed in a namespace below the pod's, all is as before"
pod a
check "exclusive mode: a pod has it" add a "$move"
pod b
refuses "exclusive mode: another pod cannot have it" 'eth1|mlx5_1' add b "$by_unit"
check "exclusive mode: the DEL of the other" del b "$by_unit"
equal "exclusive mode: the other pod has none" "" "$(ip netns exec b rdma link show)"
check "exclusive mode: DEL" del a "$move"
ip netns delete a
ip netns delete b
unchanged "exclusive mode: all is as before"
wait_for 30 rdma system set netns shared

# --- the name of the settings of all interfaces ------------------------------------------------------

# Last: its addresses' GIDs may be in another order after it.
node_policy "$allowed"
# The kernel takes this name only while the MTU is too small for IPv6.
taken "the name of the settings of all interfaces" 'ip link set net1 down; ip link set net1 mtu 1000; ip link set net1 name all'
