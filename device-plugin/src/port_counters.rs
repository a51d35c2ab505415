//! Counters of ports that say something about the fabric (`Documentation/ABI/stable/sysfs-class-infiniband`
//! and the drivers' `hw_counters`). Which of them a port has depends on its driver.

use std::fs;
use std::path::Path;

use hca::{Host, Inventory};

/// Errors on the wire, and retries that follow from them.
const ERRORS: [&str; 11] = [
    "counters/symbol_error",
    "counters/link_downed",
    "counters/port_rcv_errors",
    "counters/link_error_recovery",
    "hw_counters/out_of_sequence",
    "hw_counters/packet_seq_err",
    "hw_counters/local_ack_timeout_err",
    "hw_counters/rnr_nak_retry_err",
    "hw_counters/implied_nak_seq_err",
    "hw_counters/roce_adp_retrans",
    "hw_counters/rx_icrc_encapsulated",
];
/// Drops for want of buffers, and notifications of congestion.
const CONGESTION: [&str; 3] = [
    "hw_counters/out_of_buffer",
    "hw_counters/np_cnp_sent",
    "hw_counters/rp_cnp_handled",
];

/// A counter of a port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PortCounter {
    /// RDMA device.
    pub rdma_device: String,
    /// Number of the port.
    pub port: u32,
    /// Its name, without its directory.
    pub counter: &'static str,
    /// It counts drops for want of buffers or notifications of congestion; else errors.
    pub is_congestion: bool,
    /// Its value since the driver was loaded.
    pub value: u64,
}

fn value(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// The counters of all ports of an inventory. The driver may ask the firmware for each: reading
/// takes milliseconds.
#[must_use]
pub(crate) fn read(host: &Host, inventory: &Inventory) -> Vec<PortCounter> {
    let mut found = Vec::new();
    for device in inventory.rdma_devices() {
        for port in &device.ports {
            let place = format!("class/infiniband/{}/ports/{}", device.name, port.number);
            let directory = host.sys.join(place);
            for (paths, is_congestion) in [(&ERRORS[..], false), (&CONGESTION[..], true)] {
                found.extend(paths.iter().filter_map(|path| {
                    Some(PortCounter {
                        rdma_device: device.name.clone(),
                        port: port.number,
                        counter: path.rsplit('/').next()?,
                        is_congestion,
                        value: value(&directory.join(path))?,
                    })
                }));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use hca_trees::{Tree, machine};

    use super::*;

    #[test]
    fn counters_that_a_driver_has_are_read() {
        let directory = tempfile::tempdir().unwrap();
        let tree = Tree::new(directory.path());
        machine::egx(&tree);
        let port = "/sys/class/infiniband/mlx5_1/ports/1";
        tree.file(format!("{port}/counters/link_downed"), 3);
        tree.file(format!("{port}/hw_counters/np_cnp_sent"), 7);
        tree.file(format!("{port}/hw_counters/packet_seq_err"), "none");
        let inventory = hca::inventory(&tree.host()).unwrap();
        let counter = |counter, is_congestion, value| PortCounter {
            rdma_device: "mlx5_1".to_owned(),
            port: 1,
            counter,
            is_congestion,
            value,
        };
        let mut found = read(&tree.host(), &inventory);
        found.retain(|counter| counter.value > 0);
        assert_eq!(
            found,
            [
                counter("link_downed", false, 3),
                counter("np_cnp_sent", true, 7)
            ]
        );
    }
}
