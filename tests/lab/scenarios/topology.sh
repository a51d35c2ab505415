# Eight NICs, four GPUs, four switches, two NUMA nodes: distances are what the wiring says
# lab: topology=2x2x2 memory=1024 binaries=rdma-device-plugin,rdmactl
# shellcheck shell=bash disable=SC2016,SC2154

for nic in 0 1 2 3 4 5 6 7; do
	make_hca eth$nic
done
topology=$(rdmactl topology --json)

nics=$(for hca in /sys/class/infiniband/*; do basename "$(readlink -f "$hca/device")"; done | sort)
gpus=$(grep -l '^0x03' /sys/bus/pci/devices/*/class | cut -d/ -f6 | sort)
# The upstream port of the switch a function is plugged into, and its NUMA node.
declare -A switch numa
for function in $nics $gpus; do
	switch[$function]=$(readlink -f "/sys/bus/pci/devices/$function/../../")
	numa[$function]=$(<"/sys/bus/pci/devices/$function/numa_node")
done
# distance A B: by where the kernel has put them; every switch here is on a root port of its own.
distance() {
	distance=SOCK
	[ "${numa[$1]}" != "${numa[$2]}" ] || distance=PHB
	[ "${switch[$1]}" != "${switch[$2]}" ] || distance=PIX
}
equal "the machine is as planned: eight NICs, four display devices" "8 4" "$(wc -l <<<"$nics") $(wc -l <<<"$gpus")"

equal "all NICs are seen, in the order of their PCI addresses" "$nics" "$(jq -r '.nics[].place.address' <<<"$topology")"
equal "all GPUs are" "$gpus" "$(jq -r '.gpus[].place.address' <<<"$topology")"
wanted=$(for gpu in $gpus; do for nic in $nics; do
	distance "$gpu" "$nic"
	echo "$gpu $nic $distance"
done; done)
have=$(jq -r '. as $t | range($t.gpus | length) as $g | range($t.nics | length) as $n
	| "\($t.gpus[$g].place.address) \($t.nics[$n].place.address) \($t.distances.gpuNic[$g][$n].class)"' <<<"$topology")
equal "each GPU is as far from each NIC as the wiring has it" "$wanted" "$have"
equal "NUMA nodes are the firmware's" "$(for nic in $nics; do echo "$nic ${numa[$nic]}"; done)" \
	"$(jq -r '.nics[].place | "\(.address) \(.numa)"' <<<"$topology")"

