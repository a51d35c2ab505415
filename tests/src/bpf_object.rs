//! A BPF program as the object file that `ip` and `tc` load, without a compiler: it lets every
//! packet pass.

use std::fs;
use std::path::Path;

use anyhow::Result;

/// `BPF_ALU64 | BPF_MOV` of 2 (`XDP_PASS`) into the return register, and `BPF_EXIT`.
const CODE: [u8; 16] = [0xb7, 0, 0, 0, 2, 0, 0, 0, 0x95, 0, 0, 0, 0, 0, 0, 0];
const LICENSE: &[u8] = b"GPL\0";
const STRINGS: &[u8] = b"\0prog\0_license\0";
const NULL_SYMBOL: [u8; 24] = [0; 24];

/// Writes a relocatable ELF file for the BPF machine whose program is in section `section`
/// (`xdp` for `ip link set … xdp`, `classifier` for `tc filter … bpf`).
///
/// # Errors
/// The file cannot be written.
pub fn write(file: &Path, section: &str) -> Result<()> {
    let mut section_names = vec![0];
    let mut name = |text: &str| -> Result<u32> {
        let at = u32::try_from(section_names.len())?;
        section_names.extend(text.as_bytes());
        section_names.push(0);
        Ok(at)
    };
    let names = [
        name(section)?,
        name("license")?,
        name(".symtab")?,
        name(".strtab")?,
        name(".shstrtab")?,
    ];
    // A global function `prog` in section 1, and a global object `_license` in section 2.
    let symbols = [
        NULL_SYMBOL,
        symbol(1, 0x12, 1, CODE.len() as u64),
        symbol(6, 0x11, 2, LICENSE.len() as u64),
    ]
    .concat();
    let plain = |name, kind, flags, content| Section {
        name,
        kind,
        flags,
        content,
        strings: 0,
        first_global: 0,
        entry_bytes: 0,
    };
    let sections = [
        plain(names[0], 1, 6, &CODE[..]),
        plain(names[1], 1, 3, LICENSE),
        Section {
            strings: 4,
            first_global: 1,
            entry_bytes: 24,
            ..plain(names[2], 2, 0, &symbols)
        },
        plain(names[3], 3, 0, STRINGS),
        plain(names[4], 3, 0, &section_names),
    ];
    let mut body = Vec::new();
    let mut headers = vec![0; 64];
    for section in sections {
        body.resize(body.len().next_multiple_of(8), 0);
        headers.extend([section.name, section.kind].map(u32::to_le_bytes).concat());
        let offset = 64 + body.len() as u64;
        let length = section.content.len() as u64;
        headers.extend(
            [section.flags, 0, offset, length]
                .map(u64::to_le_bytes)
                .concat(),
        );
        headers.extend(
            [section.strings, section.first_global]
                .map(u32::to_le_bytes)
                .concat(),
        );
        headers.extend([8, section.entry_bytes].map(u64::to_le_bytes).concat());
        body.extend(section.content);
    }
    body.resize(body.len().next_multiple_of(8), 0);
    let mut elf = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    elf.extend([1_u16, 247].map(u16::to_le_bytes).concat());
    elf.extend(1_u32.to_le_bytes());
    elf.extend(
        [0, 0, 64 + body.len() as u64]
            .map(u64::to_le_bytes)
            .concat(),
    );
    elf.extend(0_u32.to_le_bytes());
    elf.extend([64_u16, 0, 0, 64, 6, 5].map(u16::to_le_bytes).concat());
    fs::write(file, [elf, body, headers].concat())?;
    Ok(())
}

/// One section and what its header says of it.
struct Section<'a> {
    name: u32,
    kind: u32,
    flags: u64,
    content: &'a [u8],
    strings: u32,
    first_global: u32,
    entry_bytes: u64,
}

fn symbol(name: u32, info: u8, section: u16, size: u64) -> [u8; 24] {
    let mut bytes = NULL_SYMBOL;
    bytes[..4].copy_from_slice(&name.to_le_bytes());
    bytes[4] = info;
    bytes[6..8].copy_from_slice(&section.to_le_bytes());
    bytes[16..].copy_from_slice(&size.to_le_bytes());
    bytes
}
