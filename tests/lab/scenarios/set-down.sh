# A NIC that is not set up: files of both peers offer and allocate it, and so does an exclusive pool
# lab: memory=1536 timeout=600 images=pods binaries=rdma-device-plugin standins=kubelet-standin
# shellcheck shell=bash disable=SC2016

make_hca_down eth0 mlx5_0
start_containerd
start_kubelet

# has RESOURCE CAPACITY ALLOCATABLE: what the kubelet says.
has() {
	[ "$2 $3" = "$(kubelet-standin node --json | jq -r --arg name "$1" '.[$name] | "\(.capacity) \(.allocatable)"')" ]
}
# offers FORMAT RESOURCE CAPACITY ALLOCATABLE CONFIGURATION
offers() {
	printf '%s\n' "$5" >/tmp/config.new
	mv /tmp/config.new /tmp/config
	[ -e "$LAB_OUT/rdma-device-plugin.log" ] || start_daemon /tmp/config
	check "$link: $1: $4 of $3 units can be had" wait_for 60 has "$2" "$3" "$4"
}
# allocated RESOURCE: a pod of this resource has the HCA's node.
allocated() {
	cat >/tmp/pod.yaml <<-POD
		apiVersion: v1
		kind: Pod
		metadata: {name: taker}
		spec:
		  restartPolicy: Never
		  hostNetwork: true
		  containers:
		  - name: main
		    image: localhost/rdma-tools:1
		    imagePullPolicy: IfNotPresent
		    command: [sleep, infinity]
		    resources: {limits: {$1: 1}}
	POD
	check "$link: a pod gets one" kubelet-standin run-pod /tmp/pod.yaml
	contains "$link: it has the device node" uverbs0 "$(kubelet-standin exec taker -- ls /dev/infiniband)"
	check "$link: the pod ends" kubelet-standin delete-pod taker
}

for link in down up; do
	if [ $link = up ]; then
		ip link set eth0 up
		active eth0 mlx5_0
	fi
	offers "the RDMA shared device plugin's file" rdma/shared 10 10 \
		'{"configList": [{"resourceName": "shared", "rdmaHcaMax": 10, "devices": ["eth0"]}]}'
	allocated rdma/shared
	offers "the SR-IOV plugin's file" example.com/nic 1 1 \
		'{"resourceList": [{"resourceName": "nic", "resourcePrefix": "example.com", "selectors": {"vendors": ["1af4"], "isRdma": true}}]}'
	allocated example.com/nic
	offers "our own format, exclusive" rdma/whole 1 1 \
		'{"version": 1, "pools": [{"resource": "rdma/whole", "mode": "exclusive", "select": {"ifNames": ["eth0"]}}]}'
	allocated rdma/whole
	# No CNI plugin sets a shared NIC up for a pod.
	usable=10
	[ $link = up ] || usable=0
	offers "our own format, shared" rdma/shares 10 $usable \
		'{"version": 1, "pools": [{"resource": "rdma/shares", "mode": "shared", "shares": 10, "select": {"ifNames": ["eth0"]}}]}'
done
