# What rdmactl discover says is what the kernel has: HCAs, ports, GIDs, nodes
# lab: nics=3 memory=640 binaries=rdma-device-plugin,rdmactl
# shellcheck shell=bash disable=SC2016

seen() { rdmactl discover --json | jq -r "$@"; }
hcas() { seen '.hcas[] | "\(.id) \(.rdmaDevices[]) \(.netdevs[])"'; }

contains "a host without RDMA drivers is reported as such" "no RDMA device" "$(rdmactl discover)"
make_hca eth0
make_hca eth1
ip addr add 192.168.10.1/24 dev eth0
ip addr add fd00:10::1/64 dev eth0 nodad
wait_for 30 gid_index rxe0 192.168.10.1
rdmactl discover
seen .

equal "an HCA is known by its PCI function, and a NIC without RDMA is none" \
	"$(printf '%s\n' '0000:01:00.0 rxe0 eth0' '0000:02:00.0 rxe1 eth1')" "$(hcas)"
# The driver's own words, through netlink, not sysfs.
wanted=$(rdma -j link show | jq -r '.[] | "\(.ifname) \(.netdev) \(.state)"' | tr '[:upper:]' '[:lower:]' | sort)
ports=$(seen '.inventory.hcas[].rdmaDevices[] | .name as $name | .ports[] | "\($name) \(.netdev) \(.state)"' | sort)
equal "every port, with its netdev and state" "$wanted" "$ports"
gid_table=$(seen '.inventory.hcas[].rdmaDevices[] | select(.name == "rxe0").ports[0].gids.entries[]
	| "\(.index) \(.gid) \(.type) \(.netdev)"')
equal "the GID table, entry by entry" "$(gids rxe0)" "$gid_table"
nodes=$(seen '.hcas[].nodes[] | "\(.path) \(.number)"')
wanted=$(cd /dev/infiniband && for hca in 0 1; do for node in uverbs umad issm; do
	stat --format '/dev/infiniband/%n %Hr:%Lr' $node$hca
done; done)
equal "the character devices with their numbers" "$wanted" "$nodes"
equal "the connection manager's, whose minor is the kernel's choice" \
	"$(stat --format %Hr:%Lr /dev/infiniband/rdma_cm)" "$(seen '.inventory.rdmaCm.number')"

ip link set eth1 down
wait_for 30 grep -q DOWN /sys/class/infiniband/rxe1/ports/1/state
contains "a port whose NIC is down is down" '^ *rxe1 .*DOWN Disabled' "$(rdmactl discover)"
ip link set eth1 name rail1
rdma dev set rxe1 name mlx5_7
contains "new names are seen" '^0000:02:00.0 mlx5_7 rail1$' "$(hcas)"

rdma system set netns exclusive
contains "the mode of RDMA's network namespaces is reported" 'network namespace mode: exclusive' "$(rdmactl discover)"
ip netns add pod
rdma dev set mlx5_7 netns pod
contains "an HCA in a pod's namespace is reported, not forgotten" 'mlx5_7 .*in another netns' "$(rdmactl discover)"
rdma link delete rxe0
contains "an HCA that is gone is gone" '^mlx5_7$' "$(seen '.hcas[].rdmaDevices[]')"
