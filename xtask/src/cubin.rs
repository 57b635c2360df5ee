//! What a compiled kernel needs of a chip, read from the cubin: an ELF file whose sections `.nv.info.NAME` hold
//! attributes.

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};

/// Needs of one kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Needs {
    /// Registers a thread.
    pub registers: u32,
    /// Bytes of local memory a thread: arrays and spilled registers.
    pub local: u32,
    /// Bytes of spilled registers a thread, of which the cubin says nothing.
    pub spilled: u32,
    /// Bytes of shared memory a block, without what a launch adds.
    pub shared: u64,
}

/// Attributes of `.nv.info`: a frame's size and the number of registers, each for a symbol.
const FRAME_SIZE: u8 = 0x11;
const REGISTER_COUNT: u8 = 0x2f;
/// An attribute of a size that is given.
const SIZED: u8 = 4;

struct Section {
    name: String,
    offset: usize,
    size: usize,
    info: u32,
    link: u32,
}

fn number(bytes: &[u8], offset: usize, width: usize) -> Result<u64> {
    let bytes = bytes.get(offset..offset + width).context("the cubin ends early")?;
    Ok(bytes.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte)))
}

fn text(bytes: &[u8], offset: usize) -> Result<String> {
    let rest = bytes.get(offset..).context("the cubin ends early")?;
    let end = rest.iter().position(|&byte| byte == 0).context("a name without end")?;
    Ok(String::from_utf8_lossy(&rest[..end]).into_owned())
}

fn sections(elf: &[u8]) -> Result<Vec<Section>> {
    ensure!(elf.starts_with(b"\x7fELF\x02"), "no 64-bit ELF file");
    let table = number(elf, 0x28, 8)? as usize;
    let width = number(elf, 0x3a, 2)? as usize;
    let count = number(elf, 0x3c, 2)? as usize;
    let names = number(elf, 0x3e, 2)? as usize;
    let names = number(elf, table + names * width + 0x18, 8)? as usize;
    (0..count)
        .map(|i| {
            let header = table + i * width;
            let name = text(elf, names + number(elf, header, 4)? as usize)?;
            Ok(Section {
                name,
                offset: number(elf, header + 0x18, 8)? as usize,
                // A section without data, as uninitialised shared memory, has a size all the same.
                size: number(elf, header + 0x20, 8)? as usize,
                link: number(elf, header + 0x28, 4)? as u32,
                info: number(elf, header + 0x2c, 4)? as u32,
            })
        })
        .collect()
}

/// Every kernel of a cubin by name.
pub(crate) fn needs(elf: &[u8]) -> Result<Vec<(String, Needs)>> {
    let sections = sections(elf)?;
    let symbols = sections.iter().find(|s| s.name == ".symtab").context("no symbols")?;
    let names = sections.get(symbols.link as usize).context("no names of symbols")?;
    let symbol = |index: u64| -> Result<String> {
        let entry = symbols.offset + index as usize * 24;
        text(elf, names.offset + number(elf, entry, 4)? as usize)
    };
    let info = sections.iter().find(|s| s.name == ".nv.info").context("no attributes")?;
    let mut found: Vec<(String, Needs)> = sections
        .iter()
        .filter_map(|s| s.name.strip_prefix(".text."))
        .map(|name| (name.to_owned(), Needs { registers: 0, local: 0, spilled: 0, shared: 0 }))
        .collect();
    let mut at = info.offset;
    while at < info.offset + info.size {
        let (format, attribute) = (elf[at], elf[at + 1]);
        let length = number(elf, at + 2, 2)? as usize;
        if format == SIZED && length == 8 && matches!(attribute, FRAME_SIZE | REGISTER_COUNT) {
            let name = symbol(number(elf, at + 4, 4)?)?;
            let value = number(elf, at + 8, 4)? as u32;
            if let Some((_, needs)) = found.iter_mut().find(|(found, _)| *found == name) {
                if attribute == FRAME_SIZE { needs.local = value } else { needs.registers = value }
            }
        }
        at += 4 + if format == SIZED { length } else { 0 };
    }
    for section in &sections {
        if let Some(name) = section.name.strip_prefix(".nv.shared.")
            && let Some((_, needs)) = found.iter_mut().find(|(found, _)| found == name)
        {
            needs.shared = section.size as u64;
        }
        // Older cubins keep the number of registers in the section's header.
        if let Some(name) = section.name.strip_prefix(".text.")
            && let Some((_, needs)) = found.iter_mut().find(|(found, _)| found == name)
            && needs.registers == 0
        {
            needs.registers = section.info >> 24;
        }
    }
    found.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(found)
}
