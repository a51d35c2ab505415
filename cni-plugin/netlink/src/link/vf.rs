//! Virtual functions, by what their physical function says of them.

use std::{fs, io, path::Path};

use netlink_packet_core::Parseable;
use netlink_packet_route::link::{LinkAttribute, LinkExtentMask, LinkMessage, VfInfo};

use super::{RTM_GETLINK, message};
use crate::{Error, Result, Socket};

/// What a PF says of one of its VFs; empty when it has none of that number, `None` when it has it and
/// says nothing of it: its driver cannot, or not now.
pub fn vf_properties(socket: &mut Socket, pf: u32, number: u32) -> Result<Option<Vec<VfInfo>>> {
    // Each names the VF it is of; its MAC address is always there.
    let is_it = |p: &VfInfo| matches!(p, VfInfo::Mac(mac) if mac.vf_id == number);
    let (count, vfs) = read(socket, pf)?;
    let of_vf = vfs.into_iter().find(|vf| vf.iter().any(is_it));
    Ok(match of_vf {
        None if number >= count => Some(Vec::new()),
        of_vf => of_vf,
    })
}

/// What a PF says of all its VFs.
pub fn vfs(socket: &mut Socket, pf: u32) -> Result<Vec<Vec<VfInfo>>> {
    Ok(read(socket, pf)?.1)
}

/// How many VFs a PF has, and what it says of them.
fn read(socket: &mut Socket, pf: u32) -> Result<(u32, Vec<Vec<VfInfo>>)> {
    /// `RTEXT_FILTER_VF` and `RTEXT_FILTER_SKIP_STATS`
    const FILTER: [LinkExtentMask; 2] = [LinkExtentMask::Vf, LinkExtentMask::SkipStats];
    let message = message(pf, vec![LinkAttribute::ExtMask(FILTER.to_vec())]);
    let what = format!("read the VFs of netdev {pf}");
    socket.get(what, RTM_GETLINK, &message, |payload| {
        let (mut count, mut vfs) = (0, Vec::new());
        for attribute in LinkMessage::parse(payload)?.attributes {
            match attribute {
                LinkAttribute::NumVf(number) => count = number,
                LinkAttribute::VfInfoList(list) => vfs.extend(list.into_iter().map(|vf| vf.0)),
                _ => {}
            }
        }
        Ok((count, vfs))
    })
}

/// Takes a PCI function from its driver, for as long as `meanwhile` runs. One without a driver is
/// given to it afterwards all the same.
///
/// # Errors
/// The driver does not let it go or does not take it; what `meanwhile` fails with.
pub fn without_driver(
    sys: &Path,
    driver: &str,
    function: &str,
    meanwhile: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let directory = sys.join("bus/pci/drivers").join(driver);
    let order = |file: &str| {
        let failed = |e: io::Error| Error::call(format_args!("{file} {function} ({driver})"), e);
        fs::OpenOptions::new()
            .write(true)
            .open(directory.join(file))
            .and_then(|mut file| io::Write::write_all(&mut file, function.as_bytes()))
            .map_err(failed)
    };
    if directory.join(function).exists() {
        order("unbind")?;
    }
    let done = meanwhile();
    order("bind").and(done)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The driver's directory, with the files that it takes orders by.
    fn driver(sys: &Path) -> std::path::PathBuf {
        let directory = sys.join("bus/pci/drivers/mlx5_core");
        fs::create_dir_all(&directory).unwrap();
        for order in ["bind", "unbind"] {
            fs::write(directory.join(order), "").unwrap();
        }
        directory
    }

    #[test]
    fn a_function_has_its_driver_again_whatever_happens_meanwhile() {
        for is_bound in [true, false] {
            let sys = tempfile::tempdir().unwrap();
            let directory = driver(sys.path());
            let order = |name: &str| fs::read_to_string(directory.join(name)).unwrap();
            if is_bound {
                fs::write(directory.join("0000:3b:00.2"), "").unwrap();
            }
            let refused = without_driver(sys.path(), "mlx5_core", "0000:3b:00.2", || {
                assert_eq!(order("bind"), "");
                assert_eq!(order("unbind").is_empty(), !is_bound);
                Err(Error::call(
                    "set",
                    io::Error::from_raw_os_error(libc::EPERM),
                ))
            });
            assert!(refused.unwrap_err().is(libc::EPERM));
            assert_eq!(order("bind"), "0000:3b:00.2");
        }
    }

    #[test]
    fn nothing_is_done_to_a_function_that_its_driver_keeps() {
        let sys = tempfile::tempdir().unwrap();
        let directory = driver(sys.path());
        fs::write(directory.join("0000:3b:00.2"), "").unwrap();
        fs::remove_file(directory.join("unbind")).unwrap();
        let kept = without_driver(sys.path(), "mlx5_core", "0000:3b:00.2", || unreachable!());
        let kept = kept.unwrap_err().to_string();
        assert!(kept.contains("unbind 0000:3b:00.2 (mlx5_core)"), "{kept}");
    }
}
