# SPDX-License-Identifier: GPL-2.0-only
"""The edits that let soft RoCE's engine serve an InfiniBand port. See README.md.

Made after those of `edit`. A text that begins with "?" is not in every kernel's driver.
"""

EDITS = {
    "Makefile": [("\trxe_lab.o \\\n", "\trxe_lab.o \\\n\trxe_ib.o \\\n")],
    "rxe_verbs.h": [
        ("\tstruct rxe_pool\t\tuc_pool;\n", "\tstruct rxe_ib_state\t*ib;\n\tstruct rxe_pool\t\tuc_pool;\n"),
        # The port has no netdev of its own (IPoIB's is the core's): packets need the cable.
        (
            "?static inline struct net_device *rxe_ib_device_get_netdev(struct ib_device *dev)\n{\n"
            "\treturn ib_device_get_netdev(dev, RXE_PORT);",
            "struct net_device *rxe_ib_cable(struct ib_device *dev);\n"
            "static inline struct net_device *rxe_ib_device_get_netdev(struct ib_device *dev)\n{\n"
            "\tstruct net_device *cable = rxe_ib_cable(dev);\n\n"
            "\tif (cable)\n\t\treturn cable;\n"
            "\treturn ib_device_get_netdev(dev, RXE_PORT);",
        ),
    ],
    # The queue pair of subnet management is served as that of general services.
    "rxe_loc.h": [
        (
            "\treturn qp->ibqp.qp_type;\n",
            "\treturn qp->ibqp.qp_type == IB_QPT_SMI ? IB_QPT_GSI : qp->ibqp.qp_type;\n",
        ),
        (".mask[qp->ibqp.qp_type]", ".mask[qp_type(qp)]"),
    ],
    "rxe.c": [
        ('#include "rxe_loc.h"\n', '#include "rxe_loc.h"\n#include "rxe_ib.h"\n'),
        ("\trdma_link_register(&rxe_link_ops);\n", "\trdma_link_register(&rxe_link_ops);\n\trxe_ib_start();\n"),
        ("\trdma_link_unregister(&rxe_link_ops);\n", "\trxe_ib_stop();\n\trdma_link_unregister(&rxe_link_ops);\n"),
    ],
    "rxe_verbs.c": [
        ('#include "rxe_lab.h"\n', '#include "rxe_lab.h"\n#include "rxe_ib.h"\n'),
        # Before soft RoCE's own: of two operations the one that was set first counts.
        (
            "\tib_set_device_ops(dev, &rxe_dev_ops);\n",
            "\tif (rxe->ib)\n\t\trxe_ib_set_ops(rxe);\n\tib_set_device_ops(dev, &rxe_dev_ops);\n",
        ),
    ],
    # Address vectors have LID, service level and, perhaps, a GRH.
    "rxe_av.c": [
        ('#include "rxe_loc.h"\n', '#include "rxe_loc.h"\n#include "rxe_ib.h"\n'),
        (
            "\trxe_av_from_attr(rdma_ah_get_port_num(attr), av, attr);\n",
            "\tif (attr->type == RDMA_AH_ATTR_TYPE_IB) {\n\t\trxe_ib_init_av(attr, av);\n\t\treturn;\n\t}\n"
            "\trxe_av_from_attr(rdma_ah_get_port_num(attr), av, attr);\n",
        ),
        (
            "\tport = &rxe->port;\n\n\tif (rdma_ah",
            "\tport = &rxe->port;\n\n\tif (attr->type == RDMA_AH_ATTR_TYPE_IB)\n\t\treturn 0;\n\tif (rdma_ah",
        ),
        (
            "\tstruct ib_global_route *grh = rdma_ah_retrieve_grh(attr);\n",
            "\tstruct ib_global_route *grh = rdma_ah_retrieve_grh(attr);\n\n"
            "\tif (av->network_type == RXE_NETWORK_TYPE_IB) {\n\t\trxe_ib_av_to_attr(av, attr);\n\t\treturn;\n\t}\n",
        ),
    ],
    "rxe_net.c": [
        ('#include "rxe_lab.h"\n', '#include "rxe_lab.h"\n#include "rxe_ib.h"\n'),
        (
            "\tport->attr.state = IB_PORT_ACTIVE;\n",
            "\tport->attr.state = rxe->ib && rxe->ib->managed ? IB_PORT_INIT : IB_PORT_ACTIVE;\n",
        ),
        (
            "\tint err = 0;\n\n\tif (skb->protocol == htons(ETH_P_IP))\n\t\terr = prepare4",
            "\tint err = 0;\n\n\tif (pkt->rxe->ib)\n\t\treturn rxe_ib_prepare(av, pkt, skb);\n"
            "\tif (skb->protocol == htons(ETH_P_IP))\n\t\terr = prepare4",
        ),
        (
            "\tif (skb->protocol == htons(ETH_P_IP))\n\t\terr = ip_local_out(",
            "\tif (pkt->rxe->ib)\n\t\terr = rxe_ib_out(skb, pkt);\n"
            "\telse if (skb->protocol == htons(ETH_P_IP))\n\t\terr = ip_local_out(",
        ),
        (
            "\tconst int port_num = 1;\n\n\tattr = rdma_get_gid_attr",
            "\tconst int port_num = 1;\n\n\tif (rxe->ib)\n\t\treturn rxe_ib_init_packet(rxe, paylen, pkt);\n"
            "\tattr = rdma_get_gid_attr",
        ),
    ],
    # Partition keys come from the port's table.
    "rxe_recv.c": [
        ('#include "rxe_loc.h"\n', '#include "rxe_loc.h"\n#include "rxe_ib.h"\n'),
        (
            "\tu16 pkey = bth_pkey(pkt);\n\n\tpkt->pkey_index = 0;\n",
            "\tu16 pkey = bth_pkey(pkt);\n\n\tif (rxe->ib)\n\t\treturn rxe_ib_check_keys(rxe, pkt, qp);\n"
            "\tpkt->pkey_index = 0;\n",
        ),
        (
            "\tif (unlikely(pkt->port_num != qp->attr.port_num))\n\t\treturn -EINVAL;\n",
            "\tif (unlikely(pkt->port_num != qp->attr.port_num))\n\t\treturn -EINVAL;\n"
            "\tif (rxe->ib)\n\t\treturn 0;\n",
        ),
        ("\tif (unlikely(qpn == 0))\n", "\tif (unlikely(qpn == 0 && !rxe->ib))\n"),
        (
            "index = (qpn == 1) ? port->qp_gsi_index : qpn;",
            "index = (qpn == 1) ? port->qp_gsi_index : qpn ? qpn : rxe->ib->smi_index;",
        ),
        (
            "\tif (pkt->mask & RXE_LOOPBACK_MASK)\n\t\treturn 0;\n",
            "\tif (pkt->mask & RXE_LOOPBACK_MASK || rxe->ib)\n\t\treturn 0;\n",
        ),
    ],
    "rxe_req.c": [
        ('#include "rxe_loc.h"\n', '#include "rxe_loc.h"\n#include "rxe_ib.h"\n'),
        (
            "solicited, 0, pad, IB_DEFAULT_PKEY_FULL, qp_num,",
            "solicited, 0, pad,\n\t\t rxe->ib ? rxe_ib_pkey(qp, ibwr->wr.ud.pkey_index) : IB_DEFAULT_PKEY_FULL, qp_num,",
        ),
    ],
    "rxe_resp.c": [
        ('#include "rxe_loc.h"\n', '#include "rxe_loc.h"\n#include "rxe_ib.h"\n'),
        (
            "opcode, 0, 0, pad, IB_DEFAULT_PKEY_FULL,\n",
            "opcode, 0, 0, pad, rxe->ib ? rxe_ib_pkey(qp, 0) : IB_DEFAULT_PKEY_FULL,\n",
        ),
        # Sent by rxe_ib_last_wqe() instead.
        (
            "?\t\tif (notify && qp->ibqp.event_handler) {\n",
            "\t\tif (notify && qp->ibqp.event_handler && !to_rdev(qp->ibqp.device)->ib) {\n",
        ),
        # Completions name LID, service level and the key's index.
        (
            "\t\t\tuwc->port_num\t\t= qp->attr.port_num;\n",
            "\t\t\tuwc->port_num\t\t= qp->attr.port_num;\n\t\t\tif (rxe->ib)\n\t\t\t\trxe_ib_user_wc(pkt, uwc);\n",
        ),
        (
            "\t\t\twc->port_num\t\t= qp->attr.port_num;\n",
            "\t\t\twc->port_num\t\t= qp->attr.port_num;\n\t\t\tif (rxe->ib)\n\t\t\t\trxe_ib_wc(pkt, wc);\n",
        ),
    ],
    "rxe_qp.c": [
        ('#include "rxe_task.h"\n', '#include "rxe_task.h"\n#include "rxe_ib.h"\n'),
        (
            "?\tqp->comp.state = QP_STATE_ERROR;\n\tqp->attr.qp_state = IB_QPS_ERR;\n",
            "\tqp->comp.state = QP_STATE_ERROR;\n\tqp->attr.qp_state = IB_QPS_ERR;\n"
            "\tif (to_rdev(qp->ibqp.device)->ib)\n\t\trxe_ib_last_wqe(qp);\n",
        ),
        (
            "?\trxe_sched_task(&qp->recv_task);\n\trxe_sched_task(&qp->send_task);\n"
            "\tspin_unlock_irqrestore(&qp->state_lock, flags);\n",
            "\trxe_sched_task(&qp->recv_task);\n\trxe_sched_task(&qp->send_task);\n"
            "\tspin_unlock_irqrestore(&qp->state_lock, flags);\n"
            "\tif (to_rdev(qp->ibqp.device)->ib)\n\t\trxe_ib_last_wqe(qp);\n",
        ),
        # Queue pair 0, of subnet management, can be made, and made again.
        (
            "\tcase IB_QPT_UD:\n\t\tbreak;\n\tdefault:\n\t\treturn -EOPNOTSUPP;",
            "\tcase IB_QPT_UD:\n\t\tbreak;\n\tcase IB_QPT_SMI:\n\t\tif (rxe->ib && !rxe->ib->smi_index)\n"
            "\t\t\tbreak;\n\t\tfallthrough;\n\tdefault:\n\t\treturn -EOPNOTSUPP;",
        ),
        (
            "\tcase IB_QPT_GSI:\n\t\tqp->ibqp.qp_num\t\t= 1;\n",
            "\tcase IB_QPT_SMI:\n\t\tqp->ibqp.qp_num\t\t= 0;\n\t\trxe->ib->smi_index\t= qpn;\n"
            "\t\tqp->attr.port_num\t= init->port_num;\n\t\tbreak;\n\n"
            "\tcase IB_QPT_GSI:\n\t\tqp->ibqp.qp_num\t\t= 1;\n",
        ),
        (
            "\tif (qp_type(qp) == IB_QPT_GSI)\n\t\tto_rdev(qp->ibqp.device)->port.qp_gsi_index = 0;\n",
            "\tif (qp->ibqp.qp_type == IB_QPT_SMI)\n\t\tto_rdev(qp->ibqp.device)->ib->smi_index = 0;\n"
            "\telse if (qp_type(qp) == IB_QPT_GSI)\n\t\tto_rdev(qp->ibqp.device)->port.qp_gsi_index = 0;\n",
        ),
    ],
}
