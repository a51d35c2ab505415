# Three nodes on a range of six addresses, their directory on NFS: pods that move soon have an address, none twice
# lab: guests=2 memory=1024 timeout=900 binaries=rdma-agent,rdma-ipam,rdmactl
# shellcheck shell=bash disable=SC2154

ip netns add pod
ip link set eth0 up
ip addr add "192.168.10.$LAB_GUEST/24" dev eth0
[ "$LAB_GUEST" = 2 ] || serve_store /srv/store 192.168.10.0/24

# node NAME: starts the agent of one more node. Its share is a mount whose caches no other node uses.
agents=()
node() {
	local root=/nodes/$1
	local etc=$root/etc/rdma-netdev
	mkdir -p "$etc" "$root/run" "$root/share" "$root/state"
	ln -s /proc "$root/proc"
	ln -s /run/netns "$root/run/netns"
	mount_store 4.2 hard,nosharecache 192.168.10.1 /srv/store "$root/share"
	shared_store "$root/share" "{\"stateDir\": \"$root/state\", \"ipam\": {\"cooldown\": \"0s\"}}" >"$etc/policy.json"
	start_agent --node "$1" --host-root "$root" --policy "$etc/policy.json" --socket "$root/run/rdma-netdev/agent.sock"
	agents+=("$agent")
}

# on NODE COMMAND…: as a program of that node.
on() {
	RDMA_NODE_NAME=$1 RDMA_HOST_ROOT=/nodes/$1 RDMA_NETDEV_POLICY=/nodes/$1/etc/rdma-netdev/policy.json "${@:2}"
}

network() {
	echo '{"cniVersion": "1.0.0", "name": "rails", "type": "rdma-netdev", "ipam": {"type": "rdma-ipam",
		"range": "'"$1"'"}}'
}
add() { on "$1" cni rdma-ipam ADD "$2" pod net1 "$(network "$3")" | jq -r '.ips[0].address'; }

# added NODE POD RANGE: as a runtime that tries again; prints the address and the milliseconds.
added() {
	local begun=${EPOCHREALTIME/./} address
	until address=$(add "$@" 2>>"$LAB_OUT/refused.log"); do
		[ $((${EPOCHREALTIME/./} - begun)) -lt 300000000 ] || { echo "$1 $2: none in five minutes" >&2 && return 1; }
		nap 1
	done
	echo "$address $(((${EPOCHREALTIME/./} - begun) / 1000))"
}
longest() { awk '$2 > most { most = $2 } END { print most }' "$@"; }

for name in n01 n02; do
	node "$name-$LAB_GUEST"
done
[ "$LAB_GUEST" = 2 ] || on "n01-1" rdmactl addresses init
meet made

# Three nodes of both guests on a /29, which has six addresses: five pods, each of which moves several times.
range=192.168.51.0/29 moves=20
homes=(n01-1 n01-2 n02-2)
at=(0 1 2 0 1)
del() { on "$1" cni rdma-ipam DEL "$2" pod net1 "$(network "$range")"; }
is_here() { [ "${1##*-}" = "$LAB_GUEST" ]; }
# arrives POD NODE: notes the address, and how long it took.
arrives() {
	local found
	! is_here "$2" || { found=$(added "$2" "moved-$1" "$range") && echo "$found" >"$LAB_OUT/at.$1" && echo "$found" >>"$LAB_OUT/moves"; }
}
for pod in "${!at[@]}"; do
	arrives "$pod" "${homes[${at[pod]}]}"
done
meet settled
twice=''
for move in $(seq $moves); do
	pod=$((move * 7 % 5))
	from=${homes[${at[pod]}]}
	at[pod]=$(((at[pod] + 1 + move % 2) % 3))
	! is_here "$from" || { del "$from" "moved-$pod" && rm "$LAB_OUT/at.$pod"; }
	meet "left-$move"
	arrives "$pod" "${homes[${at[pod]}]}"
	meet "moved-$move"
	twice+=$(cut -d ' ' -f 1 /lab/out/*/at.* | sort | uniq -d)
	meet "seen-$move"
done
equal "five pods have five addresses after each of $moves moves" "5 " "$(cat /lab/out/*/at.* | wc -l) $twice"
cat /lab/out/*/moves >/tmp/moves
equal "each pod got one each time" $((5 + moves)) "$(wc -l </tmp/moves)"
tell "three nodes on a /29: the longest ADD took $(longest /tmp/moves) ms"
check "within ten seconds" [ "$(longest /tmp/moves)" -le 10000 ]
sort -k 2 -n /tmp/moves >"$LAB_OUT/moves-by-time"
# The guest that serves it ends last.
meet over
