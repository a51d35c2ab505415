# The lab itself: soft RoCE and soft InfiniBand behave as hardware, in pods on a shared HCA and moved with its NIC
# lab: nics=2 memory=768 timeout=400
# shellcheck shell=bash

make_hca eth0
make_hca eth1
ip addr add 192.168.10.1/24 dev eth0

check "an HCA hangs below its NIC's PCI function" test -e /sys/class/infiniband/rxe0/device/vendor
equal "its nodes are there" "rdma_cm uverbs0 uverbs1" "$(cd /dev/infiniband && echo rdma_cm uverbs*)"
before=$(host_state)

# Two namespaces, as pods: macvlans on the NIC, the HCA shared.
for pod in 1 2; do
	ip netns add pod$pod
	ip link add mv$pod link eth0 type macvlan mode bridge
	ip link set mv$pod netns pod$pod
	ip -n pod$pod link set mv$pod name net1
	ip -n pod$pod addr add 192.168.10.1$pod/24 dev net1
	ip -n pod$pod link set net1 up
	ip -n pod$pod link set lo up
done

# write_bw SERVER CLIENT SERVER-ADDRESS SERVER-HCA CLIENT-ADDRESS CLIENT-HCA: ib_write_bw
# between two namespaces, by the GIDs of their addresses.
write_bw() {
	local server_gid client_gid
	server_gid=$(ip netns exec "$1" bash -c ". /lab/guest/lab.sh; gid_index $4 $3")
	client_gid=$(ip netns exec "$2" bash -c ". /lab/guest/lab.sh; gid_index $6 $5")
	ip netns exec "$1" timeout 60 ib_write_bw -u 18 -d "$4" -x "$server_gid" -n 500 &
	wait_for 20 ip netns exec "$1" bash -c 'ss -tln | grep -q :18515'
	ip netns exec "$2" timeout 60 ib_write_bw -u 18 -d "$6" -x "$client_gid" -n 500 "$3"
	wait
}

wait_for 30 gid_index rxe0 192.168.10.12
check "pods of one HCA reach each other" ip netns exec pod1 ping -c 2 -W 5 192.168.10.12
check "pods of one HCA write to each other's memory" \
	write_bw pod2 pod1 192.168.10.12 rxe0 192.168.10.11 rxe0
ip netns delete pod1
ip netns delete pod2
wait_for 30 eval '! gid_index rxe0 192.168.10.12'
as_before "the host is as before" "$before"

# Exclusive mode: a NIC and its HCA go into a namespace together, and come back when it ends.
rdma system set netns exclusive
for pod in 3 4; do
	ip netns add pod$pod
	nic=eth$((pod - 3)) hca=rxe$((pod - 3))
	ip link set $nic netns pod$pod
	rdma dev set $hca netns pod$pod
	ip -n pod$pod addr add 192.168.20.1$pod/24 dev $nic
	ip -n pod$pod link set $nic up
	ip -n pod$pod link set lo up
done
equal "moved HCAs are gone from the host" "" "$(rdma link show)"
wait_for 30 ip netns exec pod4 bash -c '. /lab/guest/lab.sh; gid_index rxe1 192.168.20.14'
check "moved HCAs write to each other's memory" \
	write_bw pod4 pod3 192.168.20.14 rxe1 192.168.20.13 rxe0
ip netns delete pod3
ip netns delete pod4
wait_for 30 test -e /sys/class/infiniband/rxe1
wait_for 30 test -e /sys/class/net/eth0
pass "NICs and HCAs come back from namespaces that end"

ip link set eth1 up
wait_for 30 grep -q ACTIVE /sys/class/infiniband/rxe1/ports/1/state
check "QEMU takes a cable out" machine set_link nic1 off
wait_for 30 grep -q DOWN /sys/class/infiniband/rxe1/ports/1/state
pass "the HCA's port goes down with it"
machine set_link nic1 on

# InfiniBand ports on the same NICs.
rdma link delete rxe0
rdma link delete rxe1
ip -4 addr flush dev eth0
make_fabric
contains "a port of InfiniBand has a LID and no netdev of its own" '^link mlx5_0/1 subnet_prefix .* lid [1-9][0-9]* .*state ACTIVE' \
	"$(rdma link show mlx5_0/1)"
equal "its IPoIB netdev stands on the NIC's PCI function" \
	"$(readlink -f /sys/class/infiniband/mlx5_0/device)" "$(readlink -f /sys/class/net/ib0/device)"
equal "its partition table is that of the lab" "0xffff 0x8001 0x0002 0x0000" \
	"$(cd /sys/class/infiniband/mlx5_0/ports/1/pkeys && cat 0 1 2 3 | paste -sd' ')"
for pod in 5 6; do
	ip netns add pod$pod
	ip link add link ib$((pod - 5)) name child$pod type ipoib pkey 0x8001
	ip link set child$pod netns pod$pod
	ip -n pod$pod addr add 192.168.30.1$pod/24 dev child$pod
	ip -n pod$pod link set child$pod up
	carries child$pod ip netns exec pod$pod
done
check "children of two HCAs reach each other" ip netns exec pod5 ping -c 2 -W 5 192.168.30.16
partitions mlx5_0 0xffff
check "a child whose key leaves the table loses its carrier" \
	wait_for 20 ip netns exec pod5 grep -q 0 /sys/class/net/child5/carrier
partitions mlx5_0 0xffff 0x0002 0x8001
carries child5 ip netns exec pod5
pass "and has it again with the key at another index"
ip netns delete pod5
check "the kernel gives a child of a namespace that ends to the host" wait_for 20 ip link show child5
ip link delete child5
ip netns delete pod6
wait_for 20 ip link show child6
ip link delete child6
ibv_rc_pingpong -d mlx5_1 -g 0 -n 100 >/dev/null &
wait_for 20 bash -c 'ss -tln | grep -q :18515'
check "HCAs write to each other by GID" timeout 60 ibv_rc_pingpong -d mlx5_0 -g 0 -n 100 localhost
wait
ip netns add pod7
rdma dev set mlx5_0 netns pod7
wait_for 20 ip link show ib0
pass "the IPoIB netdev of an HCA that moves is made anew, on the host"
ip netns delete pod7
wait_for 20 eval 'rdma link show mlx5_0/1'
equal "and there is one of it when the HCA is back" "ib0 ib1" \
	"$(ip -o link show type ipoib | sed -E 's/^[0-9]+: ([^:]*).*/\1/' | sort | paste -sd' ')"
