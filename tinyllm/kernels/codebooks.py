"""The codebooks of the IQ formats, whose weights are stored eight or four at a time as the number of a grid point.

`codebook` takes a name and returns the points as small integers, in the order in which the format numbers them.
"""

from __future__ import annotations

import base64
import zlib
from functools import cache

import numpy as np

IQ2_LEVELS = (8, 25, 43)
IQ3_XXS_LEVELS = (4, 12, 20, 28, 36, 44, 52, 62)
IQ3_S_LEVELS = (1, 3, 5, 7, 9, 11, 13, 15)
IQ1_LEVELS = (-1, 0, 1)

# A codebook is a subset of the grid levels ** dims, numbered in ascending order of the points read as numbers in base
# len(levels) with the first coordinate as the lowest digit. That makes a bitmap over the whole grid enough to hold it.
_CODEBOOKS: dict[str, tuple[tuple[int, ...], int, str]] = {
    "IQ2_XXS": (
        IQ2_LEVELS,
        8,
        "cmV~$!HEMw5Ckwal>cp*%cll5fc-fCR8IQ+o!>t9%6TkOM<Kl1`!y$hQ_E+08OlBBIfM`(3vjZl@|9Vw0TZxkN?@_51^A3md;tauP8jn6yWj"
        "=T%M^+z07?Y}05IU)=kCslRpg<iHFOQuk_8Na6FVTV6Cj9vUdS*644?oy3_xHY8w4mI04~E&C{QeX0XQH400RI3pqEgj0tmo)tU?ehQ3eHI0"
        "2qMG28==h1EL0i0RR9C1^_^?1OpHN1ONa4ARqt$@DIja6(a",
    ),
    "IQ2_XS": (
        IQ2_LEVELS,
        8,
        "cmV~$L5jmb5Ckw4^xQjO|EC8scQ3^M|H?}5`~JOW-zUHKea`L`zrUVc63=_~edj9A*;cBUtrx?*>vL7w%!*=~s6glU{yk^Uir-()CXeT12%f"
        "W@bTONNQ3R}|hT;PXFyMWAHc?NT)@Xv_yG_8L8Z83!P7$qu7SiyI=RNyfpQ}7)Tk$osGXZm-T&2ZI7mUO-xJoBMHQQhSJZJZcVs=?z&|p@o^"
        "pFjvq0v;083;WAfMGW277qZlLSz7x4m1D_1Qejqjk#Cu^6=bIT@Zzdef_jC6aqs*=u+gO3IK(!>J=qIGy+hDFLnbOE)W0;3Ia45PO3m)8goS"
        ">3IhWGU?}5&=>is55cvmAuqjC",
    ),
    "IQ2_S": (
        IQ2_LEVELS,
        8,
        "c-n1|L8@gj2n9<pa|32S243b7;{LbNgWTKyeY%|<tQ;#<m9=WLUX^>5x8Wykm(siKT2(d9%3bAEe$t|pblpab>Q!kX(MmsQ5g=~OfZ$Z-sxi"
        "_})vD3T**>Q>T-oafI9gqxH*v)vD)pp=z>N&l6hi?{j+{-UbM}mOw~SPQ#;5!@umerdyWE{^5HJ(~3^V`@VOOoH;h)^A+S70jP1g-kRi|>V$"
        "&L1W8wQx)NQILY6C}71z+N?~{3QRJ?7;ih7m%ksTwox40SyBP_^i>=HH;XKLqi2c0LgEl8TPsWjBSquxmw;)fQYfWpKeoFxBMjfc(ypz_nNe"
        "ylZ9>U2R?-+K!kw2bcGfmtL)k8&Nky|2tfSDVYk0$$He4%1zt^e0(!S&04n!`0n>2cBjf{=cpUz^nRtuJLsJNGc{Ke2xx7{$",
    ),
    "IQ3_XXS": (
        IQ3_XXS_LEVELS,
        4,
        "cmV~$F>V4e5CFj0)vjb+WeR$W3gs0?k)Hg>qC&hPWuBRt>!-80AAReb;+p;OvR=I)40~?(7p1^r^23mhKCV0HY;bf2szshoHwd^m$pxSU`uN"
        "VmS7-2!e)Wz;Ucd#*VAzrgaGWe;AH=E_`NR>6Qqlm#rXGrg>14nl%<b13z$A8f*jSj56U!g~Rtr!h@o=&*6{=t$-cUsX2$%{?PZNn`!-NOG#"
        "DW3?h6I116r2KzRm3s~q(qwl0RaCNx)k;",
    ),
    "IQ3_S": (
        IQ3_S_LEVELS,
        4,
        "cmV~$L249H6ac__kJs?0SHFi5x1G)iaZb^ZWT9??AYNw@A|%;O@BpF_!Cca+zu(T=pK*A8d;Yj|Oa1=1OfRENTZT`4I4<$9txbxZ>-Njq)=?"
        "_?#&t9C_I3E;ChPN*n;cxm%T${=>UncFrHYH4@oFMBIY>CU!8qicDqg=n4Ts_Qet6t(D|t5F=7a6K+>I5hJDYv7?^(xa;=5!{bFR^X`d5b^+"
        "49gwA+DlgC&=k3o@T9ms8o|2=IX0vB{3RinCes+;(n~NwlJP$i(^F}hXn@x801fhqUi)@q9rwzQ?30_S*XZ%sc|1iJ?FL+wL-0oKw+nVgOLz"
        "!(J8&=is&i8tSK8hVMf3RoD6I9QrTT#dzm3A_8LnI0!pDs2*7{3#wQ>",
    ),
    "IQ1": (
        IQ1_LEVELS,
        8,
        "c-k#eK}(!R7=CxE;dM-9V?RN1diSfb(^(PgE$L;EU0C#DLh=VZ*|bQ>IZZw%yXlwN6ha`hG?#HO$v6$G@ldv(umMk2dT8mb2WdTox*h^v8Vt"
        "nDuD#8?@Vw9Syw7v(LR2?w<}y}3b9YJG^C&5*&qs>Nl?x;NhAB!%0hRecnsm$a2YwJ@;QqccSPG~@n#@N5uBY$^gNY22s7}?HYgoxmY#Y+!A"
        "jh1yxWA4l1OzVO1-XRyWBes^wA;LAoBq<x!%nuPhFWp9`{&R@7DG%<XIwD^Is3Q$Jf@<B<<hd(0^?jzIHG8vQn*?-$Ub(LsHW&@kYNcQ%|}d"
        "P%c;av8KJU^mWiJv*28-WD<$YEG%#}+D!ES;XeDuFD(VlG#i@A4$V;H%7rH52w&LB_pg1xSvl=L<CZ@9?{WdkSxbxSuMq|l64F4MqT|O(RS}"
        "O@H(bLXvHn!_OntvSw2GXTKiD_6XGLxujp0!)qyF+V=7Bv?g3oFy??D1-6?{(2le%HQrc>Le(m#@Cb_P%)g$;r#{<KcsUbe#9?p_<1{H>jE?"
        "+1SCIq;Fwj@yPMjA_U90?}vdY$)D1%>fQq-z{36HBT$I&mG*v%J#A~V%aSj@pZtCEAg}V1eou`2@uUxU_YQ=)6;l3U7EjmAKr#y2F0kdO91c"
        "}@u6ikZ68>90+)KINV7E3oVy0wcNC7Qg*Gnz$6Ckekcj5w;yQl$8BcV}uIeIA*;9XR~L2uzcrHYS+2)y-rqrtcg6e{stpn$cM#il(dTBx(R&"
        "0u-;P1DmAvG}u@dX;b%ns9v~6p49X^c}lqEMlIFjzJBbrp$X4T{{D_p5YV7e^~xM<^E7<_56qcAaL=FI+lT|4v2#Y&dpW2-Egd@Fdf5G@Dhe"
        "eu*|v(bMFD;1sQ1",
    ),
}


@cache
def codebook(name: str) -> np.ndarray:
    """Grid points of the codebook `name`, read-only int8 [n_points, dims]: 8 coordinates for IQ1 and IQ2, 4 for IQ3."""
    levels, dims, packed = _CODEBOOKS[name]
    base = len(levels)
    bitmap = np.frombuffer(zlib.decompress(base64.b85decode(packed)), dtype=np.uint8)
    numbers = np.flatnonzero(np.unpackbits(bitmap, count=base**dims, bitorder="little"))
    digits = numbers[:, None] // base ** np.arange(dims) % base
    points = np.array(levels, dtype=np.int8)[digits]
    points.setflags(write=False)
    return points
