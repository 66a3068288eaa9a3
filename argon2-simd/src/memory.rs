//! Memory for blocks, in huge pages if the system has them.

use memmap2::MmapMut;

use crate::block::{BYTES, Block};

/// The size of a huge page on x86-64, and on AArch64 with 4 KiB pages.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Memory for a fixed number of blocks. The system provides a page of this memory when the page is first written. When
/// the `BlockMemory` is dropped, the system takes the pages back, and clears them before anybody else can read them.
pub(crate) struct BlockMemory {
    mapping: MmapMut,
    /// The offset of the first block in the mapping. The block is at the start of a huge page.
    start: usize,
    blocks: usize,
}

// === impl BlockMemory ===

impl BlockMemory {
    /// Reserves memory. Returns `None` if the system has no more memory to reserve.
    pub(crate) fn new(blocks: usize) -> Option<Self> {
        let bytes = blocks.checked_mul(BYTES)?;
        // A mapping can start at any page. This mapping is one huge page larger than the blocks, so that the first
        // block can start at a huge page. Addresses that are never written use no memory.
        let mapping = MmapMut::map_anon(bytes.checked_add(HUGE_PAGE_BYTES)?).ok()?;
        let start = mapping.as_ptr().align_offset(HUGE_PAGE_BYTES);
        // Uses huge pages only where the blocks fill them, so that a hash never needs more memory than its blocks. The
        // rest of the mapping is excluded, because the system can use huge pages by default. Miri has no `madvise`.
        #[cfg(all(target_os = "linux", not(miri)))]
        {
            let whole_pages = bytes / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
            // The results are ignored: if the system does not follow the advice, hashes only take longer.
            let _ = mapping.advise(memmap2::Advice::NoHugePage);
            let _ = mapping.advise_range(memmap2::Advice::HugePage, start, whole_pages);
        }
        Some(Self { mapping, start, blocks })
    }

    /// The number of blocks.
    pub(crate) const fn len(&self) -> usize {
        self.blocks
    }

    /// The first `count` blocks. They contain what was last written to them, or zeros.
    pub(crate) fn blocks(&mut self, count: usize) -> &mut [Block] {
        bytemuck::cast_slice_mut(&mut self.mapping[self.start..][..count * BYTES])
    }
}
