# Forty nodes on a range of 62 addresses, their directory on NFS: a pod of each has an address
# lab: guests=2 cpus=2 memory=1024 timeout=900 binaries=rdma-agent,rdma-ipam,rdmactl
# shellcheck shell=bash disable=SC2154

# shellcheck source=tests/lab/guest/nodes.sh
. /lab/guest/nodes.sh

mapfile -t nodes < <(seq -f "n%02g-$LAB_GUEST" 20)
for node in "${nodes[@]}"; do
	node "$node"
done
[ "$LAB_GUEST" = 2 ] || on "n01-1" rdmactl addresses init
meet made
asked=()
for node in "${nodes[@]}"; do
	added "$node" "pod-$node" 192.168.50.0/26 >"$LAB_OUT/small.$node" &
	asked+=($!)
done
for process in "${asked[@]}"; do
	wait "$process" || true
done
meet asked
cat /lab/out/*/small.* >/tmp/small
equal "a pod of each of 40 nodes has an address of a /26" "40 40" \
	"$(wc -l </tmp/small) $(cut -d ' ' -f 1 /tmp/small | sort -u | wc -l)"
tell "40 nodes on a /26: the longest ADD took $(longest /tmp/small) ms"
check "within a minute" [ "$(longest /tmp/small)" -le 60000 ]
mapfile -t own < <(cut -s -d ' ' -f 1 "$LAB_OUT"/small.*)
owner_of "/nodes/${nodes[0]}/share" 192.168.50.0/24 "${own[@]}" >"$LAB_OUT/owners"
equal "the directory says that each node owns the address of its pod" "$(printf '%s\n' "${nodes[@]}")" \
	"$(<"$LAB_OUT/owners")"
# The guest that serves it ends last.
meet over

