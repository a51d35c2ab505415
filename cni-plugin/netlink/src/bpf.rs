//! BPF programs of netdevs that netlink does not report, or does not detach: tcx programs (kernel
//! 6.6), and XDP programs that a BPF link holds. Numbers and layouts are those of `union bpf_attr`,
//! `include/uapi/linux/bpf.h`.
//!
//! A change of namespaces leaves all of them attached. Kernels that do not know them have none.

use std::{
    fmt, io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
};

use super::{
    Error, Result,
    attribute::{put, word},
};

const PROG_DETACH: libc::c_int = 9;
const PROG_GET_FD_BY_ID: libc::c_int = 13;
const OBJ_GET_INFO_BY_FD: libc::c_int = 15;
const PROG_QUERY: libc::c_int = 16;
const LINK_GET_FD_BY_ID: libc::c_int = 30;
const LINK_GET_NEXT_ID: libc::c_int = 31;
const LINK_DETACH: libc::c_int = 34;
/// `BPF_TCX_INGRESS`, `BPF_TCX_EGRESS`
const DIRECTIONS: [(u32, &str); 2] = [(46, "ingress"), (47, "egress")];
/// `BPF_LINK_TYPE_XDP`
const LINK_TYPE_XDP: u32 = 6;
/// `BPF_MPROG_MAX`: as many programs as a netdev can have in one direction.
const MOST: u32 = 64;
/// `struct bpf_link_info` as far as it is read: type, ID, program; its own part begins at 16.
const LINK_INFO_BYTES: u32 = 32;

/// What is asked: the first bytes of `union bpf_attr`; the rest counts as zero.
type Attributes = [u8; 64];

/// One call. Pointers in `attributes` were put there by `query` and `info`.
fn bpf(command: libc::c_int, attributes: &mut Attributes) -> io::Result<RawFd> {
    // SAFETY: the kernel reads and writes at most as many bytes as the call says, which are those
    // of `attributes`; buffers that these point to are owned by the callers for the whole call and
    // are as long as the count beside the pointer says.
    let done = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command,
            attributes.as_mut_ptr(),
            size_of::<Attributes>(),
        )
    };
    match RawFd::try_from(done) {
        Ok(-1) | Err(_) => Err(io::Error::last_os_error()),
        Ok(done) => Ok(done),
    }
}

/// A call that answers with a new file.
fn open(command: libc::c_int, id: u32) -> io::Result<OwnedFd> {
    let mut attributes = [0; 64];
    put(&mut attributes, 0, &id.to_ne_bytes());
    let file = bpf(command, &mut attributes)?;
    // SAFETY: the call has just made this descriptor for us alone.
    Ok(unsafe { OwnedFd::from_raw_fd(file) })
}

fn address_of(buffer: &mut [u8]) -> [u8; 8] {
    (buffer.as_mut_ptr().expose_provenance() as u64).to_ne_bytes()
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tcx {
    pub id: u32,
    /// The BPF link that holds it; 0 for none.
    link: u32,
    direction: (u32, &'static str),
}

impl fmt::Display for Tcx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tcx {} program {}", self.direction.1, self.id)
    }
}

/// The tcx programs of a netdev of the namespace this thread is in.
///
/// # Errors
/// The kernel's refusal: EPERM without the right to ask.
pub fn tcx(index: u32) -> Result<Vec<Tcx>> {
    let mut found = Vec::new();
    for direction in DIRECTIONS {
        match query(index, direction) {
            Ok(programs) => found.extend(programs),
            Err(e) => match e.raw_os_error() {
                // A kernel without them, or without BPF.
                Some(libc::EINVAL | libc::ENOSYS | libc::ENOENT) => {}
                _ => {
                    let what = format_args!("read tcx programs of netdev {index}");
                    return Err(Error::call(what, e));
                }
            },
        }
    }
    Ok(found)
}

fn query(index: u32, direction: (u32, &'static str)) -> io::Result<Vec<Tcx>> {
    let (mut ids, mut links) = ([0; MOST as usize * 4], [0; MOST as usize * 4]);
    let mut attributes = [0; 64];
    put(&mut attributes, 0, &index.to_ne_bytes());
    put(&mut attributes, 4, &direction.0.to_ne_bytes());
    put(&mut attributes, 16, &address_of(&mut ids));
    put(&mut attributes, 24, &MOST.to_ne_bytes());
    put(&mut attributes, 40, &address_of(&mut links));
    bpf(PROG_QUERY, &mut attributes)?;
    let count = word(&attributes, 24).min(MOST) as usize;
    let of_number = |number: usize| Tcx {
        id: word(&ids, number * 4),
        link: word(&links, number * 4),
        direction,
    };
    Ok((0..count).map(of_number).collect())
}

pub fn detach_tcx(index: u32, program: &Tcx) -> Result<()> {
    let detach = || {
        if program.link != 0 {
            return detach_link(program.link);
        }
        let file = open(PROG_GET_FD_BY_ID, program.id)?;
        let mut attributes = [0; 64];
        put(&mut attributes, 0, &index.to_ne_bytes());
        put(&mut attributes, 4, &file.as_raw_fd().to_ne_bytes());
        put(&mut attributes, 8, &program.direction.0.to_ne_bytes());
        bpf(PROG_DETACH, &mut attributes).map(drop)
    };
    detach().map_err(|e| Error::call(format_args!("detach {program} of netdev {index}"), e))
}

fn detach_link(id: u32) -> io::Result<()> {
    let link = open(LINK_GET_FD_BY_ID, id)?;
    let mut attributes = [0; 64];
    put(&mut attributes, 0, &link.as_raw_fd().to_ne_bytes());
    bpf(LINK_DETACH, &mut attributes).map(drop)
}

/// Detaches an XDP program that a BPF link holds.
///
/// # Errors
/// The kernel's refusal; there is no such link.
pub fn detach_xdp_link(index: u32, program: u32) -> Result<()> {
    let detach = || {
        let mut id = 0u32;
        loop {
            let mut attributes = [0; 64];
            put(&mut attributes, 0, &id.to_ne_bytes());
            bpf(LINK_GET_NEXT_ID, &mut attributes)?;
            id = word(&attributes, 4);
            let is_it = match info(id) {
                Ok(info) => {
                    word(&info, 0) == LINK_TYPE_XDP
                        && word(&info, 8) == program
                        && word(&info, 16) == index
                }
                // It went away meanwhile.
                Err(e) if e.raw_os_error() == Some(libc::ENOENT) => false,
                Err(e) => return Err(e),
            };
            if is_it {
                return detach_link(id);
            }
        }
    };
    let what = format_args!("detach XDP program {program} of netdev {index}");
    detach().map_err(|e| Error::call(what, e))
}

fn info(link: u32) -> io::Result<[u8; LINK_INFO_BYTES as usize]> {
    let file = open(LINK_GET_FD_BY_ID, link)?;
    let mut info = [0; LINK_INFO_BYTES as usize];
    let mut attributes = [0; 64];
    put(&mut attributes, 0, &file.as_raw_fd().to_ne_bytes());
    put(&mut attributes, 4, &LINK_INFO_BYTES.to_ne_bytes());
    put(&mut attributes, 8, &address_of(&mut info));
    bpf(OBJ_GET_INFO_BY_FD, &mut attributes)?;
    Ok(info)
}
