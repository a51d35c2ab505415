# Three nodes on a range of six addresses, their directory on NFS: pods that move soon have an address, none twice
# lab: guests=2 memory=1024 timeout=900 binaries=rdma-agent,rdma-ipam,rdmactl
# shellcheck shell=bash disable=SC2154

# shellcheck source=tests/lab/guest/nodes.sh
. /lab/guest/nodes.sh

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
