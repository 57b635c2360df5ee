/* A run-time compiler of which all functions are absent that tell more than the version: a broken installation. */
int nvrtcVersion(int *major, int *minor) {
    *major = 13;
    *minor = 0;
    return 0;
}
