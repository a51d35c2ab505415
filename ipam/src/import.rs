//! Reading what host-local left: its directories. What is found is a plan, and leasing it is the
//! store's business.

use ipnetwork::IpNetwork;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

/// One address to take over.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Planned {
    pub address: IpAddr,
    /// The range it belongs to.
    pub range: IpNetwork,
    pub container: String,
    pub interface: String,
}

/// Why nothing can be imported.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// A directory or file cannot be read.
    #[error("read {}: {source}", path.display())]
    Read {
        path: PathBuf,
        source: std::io::Error,
    },
    /// Something in it cannot be made sense of.
    #[error("{place}: {why}")]
    Record { place: String, why: String },
}

fn wrong(place: impl Into<String>, why: impl Into<String>) -> ImportError {
    ImportError::Record {
        place: place.into(),
        why: why.into(),
    }
}

/// The leases of a host-local directory, `/var/lib/cni/networks/<network>`: a
/// file for each address, holding container ID and interface on a line each.
/// Empty files, which a crash leaves, are not imported; their names are answered.
///
/// # Errors
/// [`ImportError`] for what cannot be read or belongs to none of `ranges`.
pub fn host_local(
    directory: &Path,
    ranges: &[IpNetwork],
) -> Result<(Vec<Planned>, Vec<String>), ImportError> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| ImportError::Read { path, source }
    };
    let (mut planned, mut empty) = (Vec::new(), Vec::new());
    for entry in std::fs::read_dir(directory).map_err(failed(directory))? {
        let path = entry.map_err(failed(directory))?.path();
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        if name == "lock" || name.starts_with("last_reserved_ip.") {
            continue;
        }
        let address: IpAddr = name
            .replace('_', ":")
            .parse()
            .map_err(|_| wrong(&name, "is no address"))?;
        let Some(range) = ranges.iter().find(|range| range.contains(address)) else {
            return Err(wrong(name, "lies in none of the ranges given"));
        };
        let text = std::fs::read_to_string(&path).map_err(failed(&path))?;
        let mut lines = text.lines().map(str::trim);
        let Some(container) = lines.next().filter(|line| !line.is_empty()) else {
            empty.push(name);
            continue;
        };
        planned.push(Planned {
            address,
            range: *range,
            container: container.to_owned(),
            // Files of old releases have the container only; its interface was eth0.
            interface: lines
                .next()
                .filter(|line| !line.is_empty())
                .unwrap_or("eth0")
                .to_owned(),
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
        let (planned, empty) = host_local(place.path(), &ranges).unwrap();
        let got: Vec<_> = planned
            .iter()
            .map(|p| (p.container.as_str(), p.interface.as_str()))
            .collect();
        assert_eq!(got, [("c1", "eth0"), ("c2", "eth0"), ("c3", "net1")]);
        assert_eq!(empty, ["10.0.0.7"]);
        assert!(host_local(place.path(), &ranges[..1]).is_err());
        write("junk", "");
        assert!(host_local(place.path(), &ranges).is_err());
    }
}
