//! Leases in a directory of host-local.

use anyhow::{Context as _, Result, bail};
use ipnetwork::IpNetwork;
use std::net::IpAddr;
use std::path::Path;

/// One address to take over.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub(super) struct Planned {
    /// The address.
    pub(super) address: IpAddr,
    /// The range it belongs to.
    pub(super) range: IpNetwork,
    /// Container ID.
    pub(super) container: String,
    /// Interface.
    pub(super) interface: String,
}

/// The leases of a host-local directory, `/var/lib/cni/networks/<network>`: a
/// file for each address, holding container ID and interface on a line each.
/// Empty files, which a crash leaves, are not imported; their names are answered.
///
/// # Errors
/// What cannot be read or belongs to none of `ranges`.
pub(super) fn read(directory: &Path, ranges: &[IpNetwork]) -> Result<(Vec<Planned>, Vec<String>)> {
    let failed = |path: &Path| format!("read {}", path.display());
    let (mut planned, mut empty) = (Vec::new(), Vec::new());
    for entry in std::fs::read_dir(directory).with_context(|| failed(directory))? {
        let path = entry.with_context(|| failed(directory))?.path();
        let name = path.file_name().unwrap_or_default();
        let name = name.to_string_lossy().into_owned();
        if name == "lock" || name.starts_with("last_reserved_ip.") {
            continue;
        }
        let address = name.replace('_', ":").parse();
        let address: IpAddr = address.with_context(|| format!("{name} is not an address"))?;
        let Some(range) = ranges.iter().find(|range| range.contains(address)) else {
            bail!("{name} lies in none of the ranges given");
        };
        let text = std::fs::read_to_string(&path).with_context(|| failed(&path))?;
        let mut lines = text.lines().map(str::trim);
        let Some(container) = lines.next().filter(|line| !line.is_empty()) else {
            empty.push(name);
            continue;
        };
        // Files of old releases have the container only; its interface was eth0.
        let interface = lines.next().filter(|line| !line.is_empty());
        planned.push(Planned {
            address,
            range: *range,
            container: container.to_owned(),
            interface: interface.unwrap_or("eth0").to_owned(),
        });
    }
    planned.sort_by_key(|planned| planned.address);
    Ok((planned, empty))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_local_files_are_read() {
        let place = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(place.path().join(name), text).unwrap();
        write("10.0.0.5", "c1\r\neth0");
        write("10.0.0.6", "c2\n");
        write("10.0.0.7", "");
        write("fd00__9", "c3\r\nnet1");
        write("lock", "");
        write("last_reserved_ip.0", "10.0.0.7");
        let ranges = ["10.0.0.0/24".parse().unwrap(), "fd00::/64".parse().unwrap()];
        let (planned, empty) = read(place.path(), &ranges).unwrap();
        let got: Vec<_> = planned
            .iter()
            .map(|p| (p.container.as_str(), p.interface.as_str()))
            .collect();
        assert_eq!(got, [("c1", "eth0"), ("c2", "eth0"), ("c3", "net1")]);
        assert_eq!(empty, ["10.0.0.7"]);
        assert!(read(place.path(), &ranges[..1]).is_err());
        write("junk", "");
        assert!(read(place.path(), &ranges).is_err());
    }
}
