"""`cuda_move.cu` as PTX, for compute_70 and later: written by tools/cuda_ptx.py, never by hand."""

SOURCE_SHA256 = "e6dcc4abf048c0eb0fcfd06cc67ef3c2ab1bf87e970168eeb5ef08ce1cee41e7"
ENTRY = b"kvbaton_move"
THREADS = 512
PTX = r""".version 8.4
.target sm_70
.address_size 64
.func _Z14copy_unalignedPcPKcj(
	.param .b64 _Z14copy_unalignedPcPKcj_param_0,
	.param .b64 _Z14copy_unalignedPcPKcj_param_1,
	.param .b32 _Z14copy_unalignedPcPKcj_param_2
)
{
	.reg .pred 	%p<31>;
	.reg .b16 	%rs<8>;
	.reg .b32 	%r<284>;
	.reg .b64 	%rd<120>;
	ld.param.u64 	%rd5, [_Z14copy_unalignedPcPKcj_param_0];
	ld.param.u64 	%rd6, [_Z14copy_unalignedPcPKcj_param_1];
	ld.param.u32 	%r70, [_Z14copy_unalignedPcPKcj_param_2];
	cvt.u32.u64 	%r71, %rd5;
	cvt.u32.u64 	%r72, %rd6;
	xor.b32  	%r1, %r72, %r71;
	and.b32  	%r73, %r1, 15;
	setp.eq.s32 	%p1, %r73, 0;
	@%p1 bra 	$L__BB0_24;
	and.b32  	%r74, %r1, 3;
	setp.eq.s32 	%p2, %r74, 0;
	@%p2 bra 	$L__BB0_7;
	mov.u32 	%r261, %tid.x;
	add.s32 	%r259, %r261, 512;
	setp.ge.u32 	%p3, %r259, %r70;
	@%p3 bra 	$L__BB0_5;
$L__BB0_3:
	add.s32 	%r75, %r259, -512;
	cvt.u64.u32 	%rd7, %r75;
	add.s64 	%rd8, %rd6, %rd7;
	ld.u8 	%rs1, [%rd8];
	cvt.u64.u32 	%rd9, %r259;
	add.s64 	%rd10, %rd6, %rd9;
	ld.u8 	%rs2, [%rd10];
	add.s64 	%rd11, %rd5, %rd7;
	st.u8 	[%rd11], %rs1;
	add.s64 	%rd12, %rd5, %rd9;
	st.u8 	[%rd12], %rs2;
	add.s32 	%r259, %r259, 1024;
	setp.lt.u32 	%p4, %r259, %r70;
	@%p4 bra 	$L__BB0_3;
	add.s32 	%r261, %r259, -512;
$L__BB0_5:
	setp.ge.u32 	%p5, %r261, %r70;
	@%p5 bra 	$L__BB0_41;
$L__BB0_6:
	cvt.u64.u32 	%rd13, %r261;
	add.s64 	%rd14, %rd6, %rd13;
	ld.u8 	%rs3, [%rd14];
	add.s64 	%rd15, %rd5, %rd13;
	st.u8 	[%rd15], %rs3;
	add.s32 	%r261, %r261, 512;
	setp.lt.u32 	%p6, %r261, %r70;
	@%p6 bra 	$L__BB0_6;
	bra.uni 	$L__BB0_41;
$L__BB0_24:
	neg.s32 	%r116, %r71;
	and.b32  	%r117, %r116, 15;
	min.u32 	%r40, %r117, %r70;
	sub.s32 	%r118, %r70, %r40;
	shr.u32 	%r41, %r118, 4;
	and.b32  	%r42, %r118, 15;
	cvt.u64.u32 	%rd68, %r40;
	add.s64 	%rd3, %rd5, %rd68;
	add.s64 	%rd4, %rd6, %rd68;
	mov.u32 	%r43, %tid.x;
	add.s32 	%r273, %r43, 512;
	setp.ge.u32 	%p19, %r273, %r41;
	mov.u32 	%r279, %r43;
	@%p19 bra 	$L__BB0_32;
	add.s32 	%r120, %r41, -513;
	sub.s32 	%r45, %r120, %r43;
	shr.u32 	%r121, %r45, 10;
	add.s32 	%r122, %r121, 1;
	and.b32  	%r274, %r122, 3;
	setp.eq.s32 	%p20, %r274, 0;
	mov.u32 	%r279, %r43;
	@%p20 bra 	$L__BB0_28;
$L__BB0_26:
	.pragma "nounroll";
	add.s32 	%r123, %r273, -512;
	mul.wide.u32 	%rd69, %r123, 16;
	add.s64 	%rd70, %rd4, %rd69;
	ld.v4.u32 	{%r124, %r125, %r126, %r127}, [%rd70];
	mul.wide.u32 	%rd71, %r273, 16;
	add.s64 	%rd72, %rd4, %rd71;
	ld.v4.u32 	{%r132, %r133, %r134, %r135}, [%rd72];
	add.s64 	%rd73, %rd3, %rd69;
	st.v4.u32 	[%rd73], {%r124, %r125, %r126, %r127};
	add.s64 	%rd74, %rd3, %rd71;
	st.v4.u32 	[%rd74], {%r132, %r133, %r134, %r135};
	add.s32 	%r273, %r273, 1024;
	add.s32 	%r274, %r274, -1;
	setp.ne.s32 	%p21, %r274, 0;
	@%p21 bra 	$L__BB0_26;
	add.s32 	%r279, %r273, -512;
$L__BB0_28:
	setp.lt.u32 	%p22, %r45, 3072;
	@%p22 bra 	$L__BB0_32;
	add.s32 	%r277, %r279, 512;
$L__BB0_30:
	add.s32 	%r140, %r277, -512;
	mul.wide.u32 	%rd75, %r140, 16;
	add.s64 	%rd76, %rd4, %rd75;
	ld.v4.u32 	{%r141, %r142, %r143, %r144}, [%rd76];
	mul.wide.u32 	%rd77, %r277, 16;
	add.s64 	%rd78, %rd4, %rd77;
	ld.v4.u32 	{%r149, %r150, %r151, %r152}, [%rd78];
	add.s64 	%rd79, %rd3, %rd75;
	st.v4.u32 	[%rd79], {%r141, %r142, %r143, %r144};
	add.s64 	%rd80, %rd3, %rd77;
	st.v4.u32 	[%rd80], {%r149, %r150, %r151, %r152};
	add.s32 	%r157, %r279, 1024;
	mul.wide.u32 	%rd81, %r157, 16;
	add.s64 	%rd82, %rd4, %rd81;
	ld.v4.u32 	{%r158, %r159, %r160, %r161}, [%rd82];
	add.s32 	%r166, %r279, 1536;
	mul.wide.u32 	%rd83, %r166, 16;
	add.s64 	%rd84, %rd4, %rd83;
	ld.v4.u32 	{%r167, %r168, %r169, %r170}, [%rd84];
	add.s64 	%rd85, %rd3, %rd81;
	st.v4.u32 	[%rd85], {%r158, %r159, %r160, %r161};
	add.s64 	%rd86, %rd3, %rd83;
	st.v4.u32 	[%rd86], {%r167, %r168, %r169, %r170};
	add.s32 	%r175, %r279, 2048;
	mul.wide.u32 	%rd87, %r175, 16;
	add.s64 	%rd88, %rd4, %rd87;
	ld.v4.u32 	{%r176, %r177, %r178, %r179}, [%rd88];
	add.s32 	%r184, %r279, 2560;
	mul.wide.u32 	%rd89, %r184, 16;
	add.s64 	%rd90, %rd4, %rd89;
	ld.v4.u32 	{%r185, %r186, %r187, %r188}, [%rd90];
	add.s64 	%rd91, %rd3, %rd87;
	st.v4.u32 	[%rd91], {%r176, %r177, %r178, %r179};
	add.s64 	%rd92, %rd3, %rd89;
	st.v4.u32 	[%rd92], {%r185, %r186, %r187, %r188};
	add.s32 	%r193, %r277, 2560;
	mul.wide.u32 	%rd93, %r193, 16;
	add.s64 	%rd94, %rd4, %rd93;
	ld.v4.u32 	{%r194, %r195, %r196, %r197}, [%rd94];
	add.s32 	%r202, %r277, 3072;
	mul.wide.u32 	%rd95, %r202, 16;
	add.s64 	%rd96, %rd4, %rd95;
	ld.v4.u32 	{%r203, %r204, %r205, %r206}, [%rd96];
	add.s64 	%rd97, %rd3, %rd93;
	st.v4.u32 	[%rd97], {%r194, %r195, %r196, %r197};
	add.s64 	%rd98, %rd3, %rd95;
	st.v4.u32 	[%rd98], {%r203, %r204, %r205, %r206};
	add.s32 	%r279, %r279, 4096;
	add.s32 	%r277, %r277, 4096;
	setp.lt.u32 	%p23, %r277, %r41;
	@%p23 bra 	$L__BB0_30;
	add.s32 	%r279, %r277, -512;
$L__BB0_32:
	setp.ge.u32 	%p24, %r279, %r41;
	@%p24 bra 	$L__BB0_37;
	not.b32 	%r211, %r279;
	add.s32 	%r61, %r41, %r211;
	shr.u32 	%r212, %r61, 9;
	add.s32 	%r213, %r212, 1;
	and.b32  	%r281, %r213, 3;
	setp.eq.s32 	%p25, %r281, 0;
	@%p25 bra 	$L__BB0_35;
$L__BB0_34:
	.pragma "nounroll";
	mul.wide.u32 	%rd99, %r279, 16;
	add.s64 	%rd100, %rd3, %rd99;
	add.s64 	%rd101, %rd4, %rd99;
	ld.v4.u32 	{%r214, %r215, %r216, %r217}, [%rd101];
	st.v4.u32 	[%rd100], {%r214, %r215, %r216, %r217};
	add.s32 	%r279, %r279, 512;
	add.s32 	%r281, %r281, -1;
	setp.ne.s32 	%p26, %r281, 0;
	@%p26 bra 	$L__BB0_34;
$L__BB0_35:
	setp.lt.u32 	%p27, %r61, 1536;
	@%p27 bra 	$L__BB0_37;
$L__BB0_36:
	mul.wide.u32 	%rd102, %r279, 16;
	add.s64 	%rd103, %rd3, %rd102;
	add.s64 	%rd104, %rd4, %rd102;
	ld.v4.u32 	{%r222, %r223, %r224, %r225}, [%rd104];
	st.v4.u32 	[%rd103], {%r222, %r223, %r224, %r225};
	add.s32 	%r230, %r279, 512;
	mul.wide.u32 	%rd105, %r230, 16;
	add.s64 	%rd106, %rd3, %rd105;
	add.s64 	%rd107, %rd4, %rd105;
	ld.v4.u32 	{%r231, %r232, %r233, %r234}, [%rd107];
	st.v4.u32 	[%rd106], {%r231, %r232, %r233, %r234};
	add.s32 	%r239, %r279, 1024;
	mul.wide.u32 	%rd108, %r239, 16;
	add.s64 	%rd109, %rd3, %rd108;
	add.s64 	%rd110, %rd4, %rd108;
	ld.v4.u32 	{%r240, %r241, %r242, %r243}, [%rd110];
	st.v4.u32 	[%rd109], {%r240, %r241, %r242, %r243};
	add.s32 	%r248, %r279, 1536;
	mul.wide.u32 	%rd111, %r248, 16;
	add.s64 	%rd112, %rd3, %rd111;
	add.s64 	%rd113, %rd4, %rd111;
	ld.v4.u32 	{%r249, %r250, %r251, %r252}, [%rd113];
	st.v4.u32 	[%rd112], {%r249, %r250, %r251, %r252};
	add.s32 	%r279, %r279, 2048;
	setp.lt.u32 	%p28, %r279, %r41;
	@%p28 bra 	$L__BB0_36;
$L__BB0_37:
	setp.ge.u32 	%p29, %r43, %r40;
	@%p29 bra 	$L__BB0_39;
	cvt.u64.u32 	%rd114, %r43;
	add.s64 	%rd115, %rd6, %rd114;
	ld.u8 	%rs6, [%rd115];
	add.s64 	%rd116, %rd5, %rd114;
	st.u8 	[%rd116], %rs6;
$L__BB0_39:
	setp.ge.u32 	%p30, %r43, %r42;
	@%p30 bra 	$L__BB0_41;
	add.s32 	%r257, %r43, %r70;
	sub.s32 	%r258, %r257, %r42;
	cvt.u64.u32 	%rd117, %r258;
	add.s64 	%rd118, %rd6, %rd117;
	ld.u8 	%rs7, [%rd118];
	add.s64 	%rd119, %rd5, %rd117;
	st.u8 	[%rd119], %rs7;
	bra.uni 	$L__BB0_41;
$L__BB0_7:
	neg.s32 	%r77, %r71;
	and.b32  	%r78, %r77, 3;
	min.u32 	%r10, %r78, %r70;
	sub.s32 	%r79, %r70, %r10;
	shr.u32 	%r11, %r79, 2;
	and.b32  	%r12, %r79, 3;
	cvt.u64.u32 	%rd16, %r10;
	add.s64 	%rd1, %rd5, %rd16;
	add.s64 	%rd2, %rd6, %rd16;
	mov.u32 	%r13, %tid.x;
	add.s32 	%r262, %r13, 512;
	setp.ge.u32 	%p7, %r262, %r11;
	mov.u32 	%r268, %r13;
	@%p7 bra 	$L__BB0_15;
	add.s32 	%r81, %r11, -513;
	sub.s32 	%r15, %r81, %r13;
	shr.u32 	%r82, %r15, 10;
	add.s32 	%r83, %r82, 1;
	and.b32  	%r263, %r83, 3;
	setp.eq.s32 	%p8, %r263, 0;
	mov.u32 	%r268, %r13;
	@%p8 bra 	$L__BB0_11;
$L__BB0_9:
	.pragma "nounroll";
	add.s32 	%r84, %r262, -512;
	mul.wide.u32 	%rd17, %r84, 4;
	add.s64 	%rd18, %rd2, %rd17;
	ld.u32 	%r85, [%rd18];
	mul.wide.u32 	%rd19, %r262, 4;
	add.s64 	%rd20, %rd2, %rd19;
	ld.u32 	%r86, [%rd20];
	add.s64 	%rd21, %rd1, %rd17;
	st.u32 	[%rd21], %r85;
	add.s64 	%rd22, %rd1, %rd19;
	st.u32 	[%rd22], %r86;
	add.s32 	%r262, %r262, 1024;
	add.s32 	%r263, %r263, -1;
	setp.ne.s32 	%p9, %r263, 0;
	@%p9 bra 	$L__BB0_9;
	add.s32 	%r268, %r262, -512;
$L__BB0_11:
	setp.lt.u32 	%p10, %r15, 3072;
	@%p10 bra 	$L__BB0_15;
	add.s32 	%r266, %r268, 512;
$L__BB0_13:
	add.s32 	%r87, %r266, -512;
	mul.wide.u32 	%rd23, %r87, 4;
	add.s64 	%rd24, %rd2, %rd23;
	ld.u32 	%r88, [%rd24];
	mul.wide.u32 	%rd25, %r266, 4;
	add.s64 	%rd26, %rd2, %rd25;
	ld.u32 	%r89, [%rd26];
	add.s64 	%rd27, %rd1, %rd23;
	st.u32 	[%rd27], %r88;
	add.s64 	%rd28, %rd1, %rd25;
	st.u32 	[%rd28], %r89;
	add.s32 	%r90, %r268, 1024;
	mul.wide.u32 	%rd29, %r90, 4;
	add.s64 	%rd30, %rd2, %rd29;
	ld.u32 	%r91, [%rd30];
	add.s32 	%r92, %r268, 1536;
	mul.wide.u32 	%rd31, %r92, 4;
	add.s64 	%rd32, %rd2, %rd31;
	ld.u32 	%r93, [%rd32];
	add.s64 	%rd33, %rd1, %rd29;
	st.u32 	[%rd33], %r91;
	add.s64 	%rd34, %rd1, %rd31;
	st.u32 	[%rd34], %r93;
	add.s32 	%r94, %r268, 2048;
	mul.wide.u32 	%rd35, %r94, 4;
	add.s64 	%rd36, %rd2, %rd35;
	ld.u32 	%r95, [%rd36];
	add.s32 	%r96, %r268, 2560;
	mul.wide.u32 	%rd37, %r96, 4;
	add.s64 	%rd38, %rd2, %rd37;
	ld.u32 	%r97, [%rd38];
	add.s64 	%rd39, %rd1, %rd35;
	st.u32 	[%rd39], %r95;
	add.s64 	%rd40, %rd1, %rd37;
	st.u32 	[%rd40], %r97;
	add.s32 	%r98, %r266, 2560;
	mul.wide.u32 	%rd41, %r98, 4;
	add.s64 	%rd42, %rd2, %rd41;
	ld.u32 	%r99, [%rd42];
	add.s32 	%r100, %r266, 3072;
	mul.wide.u32 	%rd43, %r100, 4;
	add.s64 	%rd44, %rd2, %rd43;
	ld.u32 	%r101, [%rd44];
	add.s64 	%rd45, %rd1, %rd41;
	st.u32 	[%rd45], %r99;
	add.s64 	%rd46, %rd1, %rd43;
	st.u32 	[%rd46], %r101;
	add.s32 	%r268, %r268, 4096;
	add.s32 	%r266, %r266, 4096;
	setp.lt.u32 	%p11, %r266, %r11;
	@%p11 bra 	$L__BB0_13;
	add.s32 	%r268, %r266, -512;
$L__BB0_15:
	setp.ge.u32 	%p12, %r268, %r11;
	@%p12 bra 	$L__BB0_20;
	not.b32 	%r102, %r268;
	add.s32 	%r31, %r11, %r102;
	shr.u32 	%r103, %r31, 9;
	add.s32 	%r104, %r103, 1;
	and.b32  	%r270, %r104, 3;
	setp.eq.s32 	%p13, %r270, 0;
	@%p13 bra 	$L__BB0_18;
$L__BB0_17:
	.pragma "nounroll";
	mul.wide.u32 	%rd47, %r268, 4;
	add.s64 	%rd48, %rd2, %rd47;
	ld.u32 	%r105, [%rd48];
	add.s64 	%rd49, %rd1, %rd47;
	st.u32 	[%rd49], %r105;
	add.s32 	%r268, %r268, 512;
	add.s32 	%r270, %r270, -1;
	setp.ne.s32 	%p14, %r270, 0;
	@%p14 bra 	$L__BB0_17;
$L__BB0_18:
	setp.lt.u32 	%p15, %r31, 1536;
	@%p15 bra 	$L__BB0_20;
$L__BB0_19:
	mul.wide.u32 	%rd50, %r268, 4;
	add.s64 	%rd51, %rd2, %rd50;
	ld.u32 	%r106, [%rd51];
	add.s64 	%rd52, %rd1, %rd50;
	st.u32 	[%rd52], %r106;
	add.s32 	%r107, %r268, 512;
	mul.wide.u32 	%rd53, %r107, 4;
	add.s64 	%rd54, %rd2, %rd53;
	ld.u32 	%r108, [%rd54];
	add.s64 	%rd55, %rd1, %rd53;
	st.u32 	[%rd55], %r108;
	add.s32 	%r109, %r268, 1024;
	mul.wide.u32 	%rd56, %r109, 4;
	add.s64 	%rd57, %rd2, %rd56;
	ld.u32 	%r110, [%rd57];
	add.s64 	%rd58, %rd1, %rd56;
	st.u32 	[%rd58], %r110;
	add.s32 	%r111, %r268, 1536;
	mul.wide.u32 	%rd59, %r111, 4;
	add.s64 	%rd60, %rd2, %rd59;
	ld.u32 	%r112, [%rd60];
	add.s64 	%rd61, %rd1, %rd59;
	st.u32 	[%rd61], %r112;
	add.s32 	%r268, %r268, 2048;
	setp.lt.u32 	%p16, %r268, %r11;
	@%p16 bra 	$L__BB0_19;
$L__BB0_20:
	setp.ge.u32 	%p17, %r13, %r10;
	@%p17 bra 	$L__BB0_22;
	cvt.u64.u32 	%rd62, %r13;
	add.s64 	%rd63, %rd6, %rd62;
	ld.u8 	%rs4, [%rd63];
	add.s64 	%rd64, %rd5, %rd62;
	st.u8 	[%rd64], %rs4;
$L__BB0_22:
	setp.ge.u32 	%p18, %r13, %r12;
	@%p18 bra 	$L__BB0_41;
	add.s32 	%r113, %r13, %r70;
	sub.s32 	%r114, %r113, %r12;
	cvt.u64.u32 	%rd65, %r114;
	add.s64 	%rd66, %rd6, %rd65;
	ld.u8 	%rs5, [%rd66];
	add.s64 	%rd67, %rd5, %rd65;
	st.u8 	[%rd67], %rs5;
$L__BB0_41:
	ret;
}
.visible .entry kvbaton_move(
	.param .u64 kvbaton_move_param_0,
	.param .u32 kvbaton_move_param_1
)
.maxntid 512, 1, 1
.minnctapersm 4
{
	.reg .pred 	%p<15>;
	.reg .b32 	%r<203>;
	.reg .b64 	%rd<84>;
	ld.param.u64 	%rd8, [kvbaton_move_param_0];
	ld.param.u32 	%r190, [kvbaton_move_param_1];
	cvta.to.global.u64 	%rd1, %rd8;
	mov.u32 	%r1, %ctaid.x;
	setp.lt.s32 	%p1, %r190, 2;
	mov.u64 	%rd83, 0;
	@%p1 bra 	$L__BB1_4;
	cvt.u64.u32 	%rd2, %r1;
	mov.u32 	%r191, 0;
$L__BB1_2:
	add.s32 	%r37, %r190, %r191;
	shr.u32 	%r38, %r37, 31;
	add.s32 	%r39, %r37, %r38;
	shr.s32 	%r40, %r39, 1;
	mul.lo.s32 	%r41, %r40, 6;
	mul.wide.s32 	%rd9, %r41, 8;
	add.s64 	%rd10, %rd1, %rd9;
	ld.global.nc.u64 	%rd11, [%rd10];
	setp.le.s64 	%p2, %rd11, %rd2;
	selp.b32 	%r191, %r40, %r191, %p2;
	selp.b32 	%r190, %r190, %r40, %p2;
	sub.s32 	%r42, %r190, %r191;
	setp.gt.s32 	%p3, %r42, 1;
	@%p3 bra 	$L__BB1_2;
	mul.lo.s32 	%r43, %r191, 6;
	cvt.s64.s32 	%rd83, %r43;
$L__BB1_4:
	shl.b64 	%rd12, %rd83, 3;
	add.s64 	%rd13, %rd1, %rd12;
	ld.global.nc.u64 	%rd14, [%rd13];
	cvt.u32.u64 	%r44, %rd14;
	sub.s32 	%r45, %r1, %r44;
	ld.global.nc.u64 	%rd15, [%rd13+32];
	cvt.u32.u64 	%r46, %rd15;
	div.u32 	%r47, %r45, %r46;
	mul.lo.s32 	%r48, %r47, %r46;
	sub.s32 	%r49, %r45, %r48;
	mul.lo.s32 	%r50, %r49, 3;
	cvt.u64.u32 	%rd16, %r50;
	ld.global.nc.u64 	%rd17, [%rd13+24];
	add.s64 	%rd18, %rd17, %rd16;
	shl.b64 	%rd19, %rd18, 3;
	add.s64 	%rd20, %rd1, %rd19;
	shl.b32 	%r51, %r47, 1;
	cvt.u64.u32 	%rd21, %r51;
	ld.global.nc.u64 	%rd22, [%rd13+40];
	add.s64 	%rd23, %rd22, %rd21;
	shl.b64 	%rd24, %rd23, 3;
	add.s64 	%rd25, %rd1, %rd24;
	ld.global.nc.u64 	%rd26, [%rd25];
	ld.global.nc.u64 	%rd27, [%rd13+8];
	add.s64 	%rd28, %rd26, %rd27;
	ld.global.nc.u64 	%rd29, [%rd20];
	add.s64 	%rd5, %rd28, %rd29;
	ld.global.nc.u64 	%rd30, [%rd25+8];
	ld.global.nc.u64 	%rd31, [%rd13+16];
	add.s64 	%rd32, %rd30, %rd31;
	ld.global.nc.u64 	%rd33, [%rd20+8];
	add.s64 	%rd6, %rd32, %rd33;
	ld.global.nc.u64 	%rd34, [%rd20+16];
	cvt.u32.u64 	%r6, %rd34;
	or.b64  	%rd35, %rd6, %rd5;
	or.b64  	%rd36, %rd35, %rd34;
	and.b64  	%rd37, %rd36, 15;
	setp.eq.s64 	%p4, %rd37, 0;
	@%p4 bra 	$L__BB1_6;
	{
	.reg .b32 temp_param_reg;
	.param .b64 param0;
	st.param.b64 	[param0+0], %rd5;
	.param .b64 param1;
	st.param.b64 	[param1+0], %rd6;
	.param .b32 param2;
	st.param.b32 	[param2+0], %r6;
	call.uni
	_Z14copy_unalignedPcPKcj,
	(
	param0,
	param1,
	param2
	);
	}
	bra.uni 	$L__BB1_19;
$L__BB1_6:
	shr.u32 	%r7, %r6, 4;
	mov.u32 	%r201, %tid.x;
	add.s32 	%r192, %r201, 512;
	setp.ge.u32 	%p5, %r192, %r7;
	@%p5 bra 	$L__BB1_14;
	add.s32 	%r53, %r7, -513;
	sub.s32 	%r10, %r53, %r201;
	shr.u32 	%r54, %r10, 10;
	add.s32 	%r55, %r54, 1;
	and.b32  	%r193, %r55, 3;
	setp.eq.s32 	%p6, %r193, 0;
	@%p6 bra 	$L__BB1_10;
$L__BB1_8:
	.pragma "nounroll";
	add.s32 	%r56, %r192, -512;
	mul.wide.u32 	%rd38, %r56, 16;
	add.s64 	%rd39, %rd6, %rd38;
	ld.v4.u32 	{%r57, %r58, %r59, %r60}, [%rd39];
	mul.wide.u32 	%rd40, %r192, 16;
	add.s64 	%rd41, %rd6, %rd40;
	ld.v4.u32 	{%r65, %r66, %r67, %r68}, [%rd41];
	add.s64 	%rd42, %rd5, %rd38;
	st.v4.u32 	[%rd42], {%r57, %r58, %r59, %r60};
	add.s64 	%rd43, %rd5, %rd40;
	st.v4.u32 	[%rd43], {%r65, %r66, %r67, %r68};
	add.s32 	%r192, %r192, 1024;
	add.s32 	%r193, %r193, -1;
	setp.ne.s32 	%p7, %r193, 0;
	@%p7 bra 	$L__BB1_8;
	add.s32 	%r201, %r192, -512;
$L__BB1_10:
	setp.lt.u32 	%p8, %r10, 3072;
	@%p8 bra 	$L__BB1_14;
	add.s32 	%r196, %r201, 512;
$L__BB1_12:
	add.s32 	%r73, %r196, -512;
	mul.wide.u32 	%rd44, %r73, 16;
	add.s64 	%rd45, %rd6, %rd44;
	ld.v4.u32 	{%r74, %r75, %r76, %r77}, [%rd45];
	mul.wide.u32 	%rd46, %r196, 16;
	add.s64 	%rd47, %rd6, %rd46;
	ld.v4.u32 	{%r82, %r83, %r84, %r85}, [%rd47];
	add.s64 	%rd48, %rd5, %rd44;
	st.v4.u32 	[%rd48], {%r74, %r75, %r76, %r77};
	add.s64 	%rd49, %rd5, %rd46;
	st.v4.u32 	[%rd49], {%r82, %r83, %r84, %r85};
	add.s32 	%r90, %r201, 1024;
	mul.wide.u32 	%rd50, %r90, 16;
	add.s64 	%rd51, %rd6, %rd50;
	ld.v4.u32 	{%r91, %r92, %r93, %r94}, [%rd51];
	add.s32 	%r99, %r201, 1536;
	mul.wide.u32 	%rd52, %r99, 16;
	add.s64 	%rd53, %rd6, %rd52;
	ld.v4.u32 	{%r100, %r101, %r102, %r103}, [%rd53];
	add.s64 	%rd54, %rd5, %rd50;
	st.v4.u32 	[%rd54], {%r91, %r92, %r93, %r94};
	add.s64 	%rd55, %rd5, %rd52;
	st.v4.u32 	[%rd55], {%r100, %r101, %r102, %r103};
	add.s32 	%r108, %r201, 2048;
	mul.wide.u32 	%rd56, %r108, 16;
	add.s64 	%rd57, %rd6, %rd56;
	ld.v4.u32 	{%r109, %r110, %r111, %r112}, [%rd57];
	add.s32 	%r117, %r201, 2560;
	mul.wide.u32 	%rd58, %r117, 16;
	add.s64 	%rd59, %rd6, %rd58;
	ld.v4.u32 	{%r118, %r119, %r120, %r121}, [%rd59];
	add.s64 	%rd60, %rd5, %rd56;
	st.v4.u32 	[%rd60], {%r109, %r110, %r111, %r112};
	add.s64 	%rd61, %rd5, %rd58;
	st.v4.u32 	[%rd61], {%r118, %r119, %r120, %r121};
	add.s32 	%r126, %r196, 2560;
	mul.wide.u32 	%rd62, %r126, 16;
	add.s64 	%rd63, %rd6, %rd62;
	ld.v4.u32 	{%r127, %r128, %r129, %r130}, [%rd63];
	add.s32 	%r135, %r196, 3072;
	mul.wide.u32 	%rd64, %r135, 16;
	add.s64 	%rd65, %rd6, %rd64;
	ld.v4.u32 	{%r136, %r137, %r138, %r139}, [%rd65];
	add.s64 	%rd66, %rd5, %rd62;
	st.v4.u32 	[%rd66], {%r127, %r128, %r129, %r130};
	add.s64 	%rd67, %rd5, %rd64;
	st.v4.u32 	[%rd67], {%r136, %r137, %r138, %r139};
	add.s32 	%r201, %r201, 4096;
	add.s32 	%r196, %r196, 4096;
	setp.lt.u32 	%p9, %r196, %r7;
	@%p9 bra 	$L__BB1_12;
	add.s32 	%r201, %r196, -512;
$L__BB1_14:
	setp.ge.u32 	%p10, %r201, %r7;
	@%p10 bra 	$L__BB1_19;
	not.b32 	%r144, %r201;
	add.s32 	%r26, %r7, %r144;
	shr.u32 	%r145, %r26, 9;
	add.s32 	%r146, %r145, 1;
	and.b32  	%r200, %r146, 3;
	setp.eq.s32 	%p11, %r200, 0;
	@%p11 bra 	$L__BB1_17;
$L__BB1_16:
	.pragma "nounroll";
	mul.wide.u32 	%rd68, %r201, 16;
	add.s64 	%rd69, %rd5, %rd68;
	add.s64 	%rd70, %rd6, %rd68;
	ld.v4.u32 	{%r147, %r148, %r149, %r150}, [%rd70];
	st.v4.u32 	[%rd69], {%r147, %r148, %r149, %r150};
	add.s32 	%r201, %r201, 512;
	add.s32 	%r200, %r200, -1;
	setp.ne.s32 	%p12, %r200, 0;
	@%p12 bra 	$L__BB1_16;
$L__BB1_17:
	setp.lt.u32 	%p13, %r26, 1536;
	@%p13 bra 	$L__BB1_19;
$L__BB1_18:
	mul.wide.u32 	%rd71, %r201, 16;
	add.s64 	%rd72, %rd5, %rd71;
	add.s64 	%rd73, %rd6, %rd71;
	ld.v4.u32 	{%r155, %r156, %r157, %r158}, [%rd73];
	st.v4.u32 	[%rd72], {%r155, %r156, %r157, %r158};
	add.s32 	%r163, %r201, 512;
	mul.wide.u32 	%rd74, %r163, 16;
	add.s64 	%rd75, %rd5, %rd74;
	add.s64 	%rd76, %rd6, %rd74;
	ld.v4.u32 	{%r164, %r165, %r166, %r167}, [%rd76];
	st.v4.u32 	[%rd75], {%r164, %r165, %r166, %r167};
	add.s32 	%r172, %r201, 1024;
	mul.wide.u32 	%rd77, %r172, 16;
	add.s64 	%rd78, %rd5, %rd77;
	add.s64 	%rd79, %rd6, %rd77;
	ld.v4.u32 	{%r173, %r174, %r175, %r176}, [%rd79];
	st.v4.u32 	[%rd78], {%r173, %r174, %r175, %r176};
	add.s32 	%r181, %r201, 1536;
	mul.wide.u32 	%rd80, %r181, 16;
	add.s64 	%rd81, %rd5, %rd80;
	add.s64 	%rd82, %rd6, %rd80;
	ld.v4.u32 	{%r182, %r183, %r184, %r185}, [%rd82];
	st.v4.u32 	[%rd81], {%r182, %r183, %r184, %r185};
	add.s32 	%r201, %r201, 2048;
	setp.lt.u32 	%p14, %r201, %r7;
	@%p14 bra 	$L__BB1_18;
$L__BB1_19:
	ret;
}
"""
