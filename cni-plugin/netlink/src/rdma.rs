//! RDMA devices of a namespace, over RDMA netlink: listing, moving, renaming.
//!
//! Netlink is the only source for a device's index, by which a move between namespaces names it, and
//! for the character device that a device has at this moment: a move hands out new minors. A message
//! is attributes without a header of their own; its type is `client << 10 | command` with client 5.
//! Numbers are those of `include/uapi/rdma/rdma_netlink.h`.

use hca::Guid;

use super::{
    Name, Namespace, Result, Socket,
    attribute::{self, Raw},
    socket::on_errno,
};

const CLIENT: u16 = 5 << 10;
const GET: u16 = CLIENT | 1;
const SET: u16 = CLIENT | 2;
const GET_CHARDEV: u16 = CLIENT | 15;
const GET_CONTEXTS: u16 = CLIENT | 22;

const DEV_INDEX: u16 = 1;
const DEV_NAME: u16 = 2;
const NODE_GUID: u16 = 6;
const PID: u16 = 28;
const NET_NS_FD: u16 = 68;
const CHARDEV_TYPE: u16 = 69;
const CHARDEV_NAME: u16 = 70;
const CONTEXTS: u16 = 86;
const CONTEXT: u16 = 87;

/// A device, as netlink reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// Index, by which requests name the device. A move keeps it; a driver that binds again gives
    /// another.
    pub index: u32,
    pub name: String,
    /// Node GUID; `None` if zero.
    pub node_guid: Option<Guid>,
}

impl Device {
    /// `None` if the message lacks index or name.
    fn parse(payload: &[u8]) -> Option<Self> {
        let (mut index, mut name, mut node_guid) = (None, None, None);
        attribute::each(payload, |kind, value| match kind {
            DEV_INDEX => index = attribute::number(value),
            DEV_NAME => name = Some(Name::of_attribute(value).to_string()),
            NODE_GUID => node_guid = long(value).filter(|guid| *guid != 0).map(Guid),
            _ => {}
        });
        Some(Self {
            index: index?,
            name: name?,
            node_guid,
        })
    }
}

/// The name of a character device; its number follows from that.
fn node_name(payload: &[u8]) -> Option<String> {
    let mut name = None;
    attribute::each(payload, |kind, value| {
        if kind == CHARDEV_NAME {
            name = Some(Name::of_attribute(value).to_string());
        }
    });
    name
}

fn long(value: &[u8]) -> Option<u64> {
    value.first_chunk().map(|bytes| u64::from_ne_bytes(*bytes))
}

fn of_device(device: &Device) -> Raw {
    Raw::default().with(DEV_INDEX, &device.index.to_ne_bytes())
}

/// A socket of the namespace; none when no RDMA stack is loaded.
///
/// # Errors
/// The namespace cannot be entered, or the process has no descriptors left.
pub fn socket(of: &Namespace, own: &Namespace) -> Result<Option<Socket>> {
    #[cfg(any(test, feature = "fake"))]
    if of.is_fake() {
        return of.socket(own).map(Some);
    }
    // Entering takes a right that a read of this thread's own namespace does not need.
    match of.id() == own.id() {
        true => Socket::open_rdma(),
        false => of.enter(own, Socket::open_rdma)?,
    }
}

/// The devices of the socket's namespace; of all of them in shared mode.
pub fn list(socket: &mut Socket) -> Result<Vec<Device>> {
    socket.dump("list RDMA devices", GET, &Raw::default(), |payload| {
        Ok(Device::parse(payload))
    })
}

/// The name of the verbs node that a device has now, such as `uverbs0`; none without the module
/// `ib_uverbs`.
pub fn verbs_node(socket: &mut Socket, device: &Device) -> Result<Option<String>> {
    let request = of_device(device).with(CHARDEV_TYPE, &Name::from("uverbs").to_attribute());
    let what = format!("find the verbs node of RDMA device {}", device.name);
    let asked = socket.get(what, GET_CHARDEV, &request, |payload| {
        Ok(node_name(payload))
    });
    // No client of that name, or one that has no node for this device (`ib_get_client_nl_info`,
    // drivers/infiniband/core/device.c).
    on_errno(asked, &[libc::ENOENT, libc::EOPNOTSUPP, libc::ENODEV], None)
}

/// The processes that have verbs contexts, each with the name of the device, of the devices that
/// `is_wanted`. A process that the reader's PID namespace does not have is left out
/// (`fill_res_name_pid()`, drivers/infiniband/core/nldev.c). None before kernel 5.12.
pub fn contexts(
    socket: &mut Socket,
    is_wanted: impl Fn(&str) -> bool,
) -> Result<Vec<(String, u32)>> {
    let mut all = Vec::new();
    for device in list(socket)? {
        if !is_wanted(&device.name) {
            continue;
        }
        let what = format!("list the contexts of RDMA device {}", device.name);
        let asked = socket.dump(what, GET_CONTEXTS, &of_device(&device), |payload| {
            Ok(Some(processes(payload)))
        });
        // Another one has gone meanwhile.
        let unknown = [libc::EINVAL, libc::EOPNOTSUPP, libc::ENODEV];
        let processes = on_errno(asked, &unknown, Vec::new())?;
        let processes = processes.into_iter().flatten();
        all.extend(processes.map(|pid| (device.name.clone(), pid)));
    }
    Ok(all)
}

fn processes(payload: &[u8]) -> Vec<u32> {
    let mut all = Vec::new();
    attribute::each(payload, |kind, contexts| {
        if kind != CONTEXTS {
            return;
        }
        attribute::each(contexts, |kind, context| {
            if kind != CONTEXT {
                return;
            }
            attribute::each(context, |kind, value| {
                all.extend(attribute::number(value).filter(|_| kind == PID));
            });
        });
    });
    all
}

/// Moves a device of the socket's namespace into another. Call from within that namespace: the
/// kernel reads the caller's, not the socket's (`ib_device_set_netns_put()`).
///
/// # Errors
/// The kernel's refusal: EOPNOTSUPP when the driver cannot be moved, or in shared mode.
pub fn give(socket: &mut Socket, device: &Device, to: &Namespace) -> Result<()> {
    let what = format!(
        "move RDMA device {} into {}",
        device.name,
        to.path().display()
    );
    let request = of_device(device).with(NET_NS_FD, &to.fd().to_ne_bytes());
    socket.request(what, SET, 0, &request)
}

/// Renames a device of the socket's namespace.
pub fn rename(socket: &mut Socket, device: &Device, name: &str) -> Result<()> {
    let what = format!("rename RDMA device {} to {name}", device.name);
    let request = of_device(device).with(DEV_NAME, &Name::from(name).to_attribute());
    socket.request(what, SET, 0, &request)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn no_bytes_make_the_readers_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = (Device::parse(&bytes), node_name(&bytes), processes(&bytes));
        }
    }

    fn bytes(hex: &str) -> Vec<u8> {
        let digits = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
        (0..hex.len()).step_by(2).map(digits).collect()
    }

    /// Payloads of answers of Linux 6.1 with soft RoCE.
    const DEVICE: &str = "080001000300000009000200727865330000000008000300010000000c\
         000400763c2201000000000c000600070100feff0054500c000700070100feff00545005000e0001000000\
         050054000000000009004300726f636500000000";
    const UVERBS: &str = "080049000e0000000c004800c3e70000000000000c0047000200000000\
         0000000c0046007576657262733300";
    const CONTEXTS_OF_DEVICE: &str = "08000100000000000b0002006d6c78355f300000180056001400570008\
         0040000000000008001c00a8000000";

    #[test]
    fn a_device_is_read_from_a_kernels_answer() {
        let device = Device {
            index: 3,
            name: "rxe3".into(),
            node_guid: Some(Guid(0x5054_00ff_fe00_0107)),
        };
        assert_eq!(Device::parse(&bytes(DEVICE)), Some(device));
        assert_eq!(Device::parse(&bytes(UVERBS)), None);
    }

    #[test]
    fn a_verbs_node_is_read_from_a_kernels_answer() {
        assert_eq!(node_name(&bytes(UVERBS)).as_deref(), Some("uverbs3"));
    }

    #[test]
    fn processes_are_read_from_the_contexts_of_a_device() {
        assert_eq!(processes(&bytes(CONTEXTS_OF_DEVICE)), [168]);
        // One of a process that the reader's namespace does not have.
        let hidden = Raw::default().with(64, &1_u32.to_ne_bytes());
        let hidden = Raw::default().nest(CONTEXT, &hidden);
        let answer = Raw::default().nest(CONTEXTS, &hidden);
        assert_eq!(processes(answer.as_bytes()), [0_u32; 0]);
    }

    #[test]
    fn a_rename_has_the_attributes_of_the_rdma_tool() {
        // What rdma(8) of iproute2 6.1 sends behind the netlink header, as strace shows it.
        let expected = bytes("08000100000000000b0002006d6c78355f370000");
        let device = Device {
            index: 0,
            name: String::new(),
            node_guid: None,
        };
        let request = of_device(&device).with(DEV_NAME, &Name::from("mlx5_7").to_attribute());
        assert_eq!(request.as_bytes(), expected);
        assert_eq!(SET, 0x1402);
    }
}
